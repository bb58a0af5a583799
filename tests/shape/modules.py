"""Which file belongs to which module: the core, by part, and the features, each with the names that tell of it.

A pattern ends in / for a directory with all that is below it; a * does not go over a /. The first
module that matches a file has it. Features come first, so a feature's file in a directory of the
core is the feature's.
"""

import fnmatch
import functools
import os
import re

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

C = (".c", ".h")
SOURCES = (*C, ".S", ".cu", ".cuh", ".py", ".sh", ".mk", "Makefile")

#: Modules of features.
FEATURES = {
    "retrieval": ["daemon/retrieval/", "kernels/sparse/", "kernels/attend/"],
    "block pool": ["daemon/block_pool/", "kernels/entries/"],
    "mapping": ["daemon/mapping/", "proto/memory/mapping.*"],
    "encoding": ["daemon/encoding/", "daemon/cuda/convert.c", "kernels/encoding/"],
    "blend": ["daemon/blend/", "kernels/rope/"],
    "lookup tables": ["daemon/lookup_table/", "proto/memory/lookup_table.*"],
    "events": ["daemon/events/"],
    "encryption": ["daemon/encryption/"],
    "other roots": ["daemon/backend/nfs/", "daemon/backend/s3/", "daemon/backend/mooncake/"],
    "collection on roots": ["daemon/gc/"],
    "trace": ["daemon/trace/"],
    "operators": ["daemon/admin/"],
    "learning": ["daemon/learn/"],
    "snapshot": ["daemon/snapshot/"],
    "scrub": ["daemon/scrub/"],
    "checkpoints": ["daemon/checkpoint/"],
    "cuda": ["daemon/cuda/", "kernels/*.cu", "kernels/*.cuh", "proto/memory/staging.*"],
    "features of the client": ["client/lib/features/"],
    "messages of features": ["proto/features/"],
    "metrics": ["proto/metrics/"],
    "arithmetic": ["kernels/arith.h", "kernels/simd/"],
    "sparse client": ["client/lib/sparse/"],
}

#: Parts of the core.
CORE = {
    "front": ["daemon/front/"],
    "requests": ["daemon/request/"],
    "cache": ["daemon/cache/"],
    "index": ["daemon/index/"],
    "arena": ["daemon/arena/"],
    "tenant": ["daemon/tenant/"],
    "tier": ["daemon/tier/"],
    # A directory root is a process. How the daemon speaks with it, and what it does, belongs to the
    # core.
    "directory root": ["daemon/shared/process/", "daemon/backend/"],
    "share": ["daemon/shared/"],
    "device": ["daemon/device/"],
    "format": ["daemon/format/"],
    "base": ["daemon/base/"],
    "proto": ["proto/"],
    "kernels": ["kernels/*.[ch]"],
    "client": ["client/lib/"],
}

#: Headers of features that the core may include, and why.
INTERFACES = {
    "daemon/learn/learn.h": "the policy asks what the traffic taught it, and a namespace counts for it",
    "daemon/cuda/cuda.h": "GPUs are devices; daemon/cuda/none.c has it in a build without CUDA",
    "daemon/encryption/encryption.h": "the tag belongs to the format of a record, and the key to its namespace",
    "kernels/encoding/encoding.h": "a form says which codec its layers have (base/form.h), and a device runs it",
    "proto/metrics/metrics.h": "a module counts what it does in the one table of counters",
    "proto/features/encoding.h": "one table has all messages of the wire",
    "proto/features/operators.h": "the same",
    "proto/features/retrieval.h": "the same",
    "proto/features/sparse.h": "the same",
    "kernels/rope/rope.h": "a copy says how far it re-rotates K",
    "proto/memory/staging.h": "a client registers the memory of a ring, and abandons it when its connection breaks",
}

#: Files that name every feature because they list them, and files of another process.
APART = ("daemon/features.", "daemon/backend/")

#: For a subject: its module, the words of C that name it outside of the module, and similar words that mean something else.
NAMES = {
    "encodings": ("encoding", r"\w*(?:encoding|encoded|codec|(?<!de)encoded|coding)\w*|mixed_\w+", r"yaml\w*"),
    "shared mappings": ("mapping", r"mappings?_\w+|\w+_mappings?(?:_\w+)?|\w*relocat\w*", r"(?:read_)?mapping_(?:start|end|of)\w*|read_mapping|yaml\w*|limit_mappings|mappings_(?:max|usual)"),
    "summaries and sequences": ("retrieval", r"summaries?_\w+|sequences?_\w+|\w+_(?:summary|sequence)s?(?:_\w+)?|derived_\w+|summaries|sequences",
                           r"(?:\w+_)?(?:from|segment|record|records|last|first|nvme|nvme_io|fake)_sequence\w*|(?:usage|read)_(?:summary|sequence)|sequence_(?:start|end)\w*|derived_(?:drop|find|free|n|new|max)|(?:evp|xxh|ossl|yaml)\w*"),
    "lookup tables": ("lookup tables", r"lookup_table?_\w+|\w+_lookup_table?(?:_\w+)?|lookup_table", r"\w*_table_read"),
    "events": ("events", r"events_\w+|\w+_events", r"events_foreign|process_events"),
}


def listed(*tops, ends=SOURCES):
    """Files of these directories, and these files."""
    for top in tops:
        if os.path.isfile(os.path.join(TOP, top)):
            yield top
        for directory, directories, names in os.walk(os.path.join(TOP, top)):
            directories[:] = sorted(name for name in directories if name != "__pycache__")
            for name in sorted(names):
                if name.endswith(ends):
                    yield os.path.relpath(os.path.join(directory, name), TOP)


def read(file):
    with open(os.path.join(TOP, file), encoding="utf-8", errors="replace") as text:
        return text.read()


@functools.cache
def compiled(pattern):
    return re.compile(re.escape(pattern) if pattern.endswith("/") else fnmatch.translate(pattern).replace(".*", "[^/]*"))


def within(file, patterns):
    return any(compiled(pattern).match(file) for pattern in patterns)


def feature_of(file):
    return next((module for module, patterns in FEATURES.items() if within(file, patterns)), None)


def core_of(file):
    """The part of the core that has the file; None: a feature's, or neither's."""
    return None if feature_of(file) else next((part for part, patterns in CORE.items() if within(file, patterns)), None)
