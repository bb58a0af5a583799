#!/bin/bash
# share_bundle.sh BUILD FOLDER [MOONCAKE_VENV]: a folder that measures roots of the shared tier on a host without Debian's packages, by its run.sh: the
# programs of BUILD, nfs-ganesha, and Mooncake's master and client for the other host's Python (BUNDLE_PYTHON, 3.12), if PyPI has them. Each program
# finds its libraries beside it, also in a sandbox that forgets the environment.
set -eu
build=$1 folder=$2 venv=$(readlink -m "${3:-none}")
here=$(dirname "$0")
top=$here/../..

# laid FOLDER LIB PROGRAM...: stripped copies in FOLDER that look for libraries in LIB, from there.
laid() {
    local to=$1 lib=$2 file
    shift 2
    mkdir -p "$to"
    "$here/bundle_libs.sh" "$to/$lib" "$@"
    for file in "$@"; do
        cp -L "$file" "$to/"
        strip "$to/${file##*/}"
        patchelf --force-rpath --set-rpath "\$ORIGIN/$lib" "$to/${file##*/}"
    done
    # What a library is linked to lies beside it.
    find "$to/$lib" -name '*.so*' -exec patchelf --force-rpath --set-rpath "\$ORIGIN" {} +
}

mooncake() {
    local wheels=$build/wheels-mooncake python=${BUNDLE_PYTHON:-3.12}
    local wanted=mooncake-transfer-engine-non-cuda==${MOONCAKE_VERSION:-0.3.13.post1}
    python3 -m pip -q --disable-pip-version-check --timeout 20 download --no-deps --python-version "$python" --platform manylinux_2_28_x86_64 \
        --only-binary :all: -d "$wheels" "$wanted" || return
    mkdir "$out/mooncake"
    python3 -m zipfile -e "$wheels"/mooncake_*-cp"${python/./}"-*.whl "$out/mooncake/site"
    (
        cd "$out/mooncake/site"
        rm -rf mooncake/engine.so mooncake/mooncake_client mooncake/transfer_engine_bench ./*.dist-info
        strip mooncake/*.so mooncake_*.libs/*
        chmod +x mooncake/mooncake_master
        strip mooncake/mooncake_master
    )
    LD_LIBRARY_PATH=$(echo "$venv"/rdma/usr/lib/*-linux-gnu):$(echo "$venv"/rdma/lib/*-linux-gnu) \
        "$here/bundle_libs.sh" "$out/mooncake/lib" "$out/mooncake/site/mooncake/store.so" "$out/mooncake/site/mooncake/mooncake_master"
    rm -f "$out"/mooncake/lib/libasio* "$out"/mooncake/lib/libetcd* "$out"/mooncake/lib/lib*-????????.so*
}

rm -rf "$folder"
out=$folder/files
mkdir -p "$out/etc"
laid "$out/build" lib "$build"/{ucmd,ucm-bench,ucmctl} "$build"/ucmd-backend-{folder,nfs,s3}
laid "$out/build/bench" ../lib "$build"/bench/{s3_bench,backend_bench}
cp "$build/ucmd-backend-mooncake" "$out/build/"
laid "$out/server" ../build/lib "$(command -v ganesha.nfsd)" /usr/sbin/rpcbind "$(command -v ip)"
# Ganesha opens its own library and its way to folders by name.
cp -L /usr/lib/*-linux-gnu/ganesha/libfsalvfs.so "$out/server/"
patchelf --force-rpath --set-rpath "\$ORIGIN/../build/lib" "$out/server/libfsalvfs.so"
cp /etc/netconfig /etc/services /etc/protocols "$out/etc/"
for file in daemon/backend/folder.py docs/protocol.md tests/bench/{backend_kills,mooncake_bench,nfs_beside}.py \
    tests/integration/{daemon,hosts,second_client,swift_case,mooncake_server}.py; do
    install -D "$top/$file" "$out/$file"
done
cp "$here/share_bundle_run.sh" "$folder/run.sh"
mooncake || echo "share-bundle: without Mooncake, whose wheel did not come from PyPI" >&2
XZ_OPT=-2 tar cJf "$folder/files.tar.xz" -C "$out" .
rm -rf "$out"
du -sh "$folder"
