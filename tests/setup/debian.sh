# shellcheck shell=bash
# debian.sh, to be sourced: functions for scripts that make a Debian below a directory.
release=bookworm

# The first archive in apt's sources that has the release, in either of the two formats.
mirror() {
    local file
    for file in /etc/apt/sources.list.d/*.sources; do
        [ -e "$file" ] || continue
        awk -v release="$release" 'BEGIN { RS = ""; FS = "\n" } {
            uri = suites = ""
            for (i = 1; i <= NF; i++) {
                if ($i ~ /^URIs:/) { split($i, word, /[ \t]+/); uri = word[2] }
                if ($i ~ /^Suites:/) suites = $i " "
            }
            if (uri != "" && index(suites, " " release " ")) { print uri; exit }
        }' "$file"
    done
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
        [ -e "$file" ] || continue
        sed -E 's/\[[^]]*\]//' "$file" | awk -v release="$release" '$1 == "deb" && $3 == release { print $2 }'
    done
}

# debian_make ROOT INCLUDE: a minimal Debian with these packages, whose apt reaches the archive as this host's does.
debian_make() {
    local root=$1 archive
    archive=$(mirror | head -n 1)
    [ -n "$archive" ] || { echo "apt's sources name no archive of Debian $release" >&2; return 1; }
    timeout 900 debootstrap --variant=minbase --include="$2" "$release" "$root" "$archive" >"$root.log" 2>&1 ||
        { tail -n 20 "$root.log" >&2; rm -f "$root.log"; return 1; }
    rm -f "$root.log"
    apt-config dump | grep -E '^Acquire::(https?|Check|Retries|ForceIPv)' >"$root/etc/apt/apt.conf.d/99host" || true
    cp -L /etc/hosts /etc/resolv.conf "$root/etc/"
}
