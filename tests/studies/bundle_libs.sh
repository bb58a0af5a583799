#!/bin/sh
# bundle_libs.sh DIRECTORY PROGRAM...: copies the shared libraries of programs into DIRECTORY,
# except the C library, which is the other host's own.
set -eu
directory=$1
shift
mkdir -p "$directory"
ldd "$@" | awk '/=> \// {print $3}' | sort -u | grep -vE '/(libc|libm|libdl|librt|libpthread|libresolv|libstdc\+\+|libgcc_s|ld-linux[^/]*)\.so' |
    while read -r lib; do cp -L "$lib" "$directory"; done
