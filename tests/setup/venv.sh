#!/bin/sh
# venv.sh DIRECTORY MODULE PACKAGE...: a virtual environment with these packages of PyPI, in which MODULE can be imported. Made once: it
# stays until the packages change.
set -eu

venv=$1 module=$2
shift 2
wanted=$*
[ "$(cat "$venv/ucmd.wanted" 2>/dev/null)" != "$wanted" ] || exit 0
rm -rf "$venv"
python3 -m venv "$venv" || {
    echo "ucmd: python3 has no venv: install python3-venv" >&2
    exit 1
}
echo "ucmd: fetching $wanted and what it needs"
"$venv/bin/pip" -q --disable-pip-version-check install "$@" || {
    echo "ucmd: pip can't install $wanted: it needs PyPI, or a directory with their wheels and those that they name" \
         "(PIP_NO_INDEX=1 PIP_FIND_LINKS=DIRECTORY)" >&2
    exit 1
}
(cd "$venv" && bin/python -c "import $module") || {
    echo "ucmd: $module can't be imported from $venv" >&2
    exit 1
}
echo "$wanted" >"$venv/ucmd.wanted"
