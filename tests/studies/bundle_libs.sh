#!/bin/sh
# bundle_libs.sh FOLDER PROGRAM...: copies the shared libraries of programs into FOLDER, but for the C library, which is the other host's own.
set -eu
folder=$1
shift
mkdir -p "$folder"
ldd "$@" | awk '/=> \// {print $3}' | sort -u | grep -vE '/(libc|libm|libdl|librt|libpthread|libresolv|libstdc\+\+|libgcc_s|ld-linux[^/]*)\.so' |
    while read -r lib; do cp -L "$lib" "$folder"; done
