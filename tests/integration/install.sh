#!/usr/bin/env bash
# Ceph's programs, what makes and ends TLS, and npm, from Debian's packages. Does nothing where they are there.
set -euo pipefail

# Each program, and the package that brings it.
needed=(radosgw:radosgw ceph-mon:ceph-mon ceph-osd:ceph-osd monmaptool:ceph-base ceph:ceph-common radosgw-admin:ceph-common
    haproxy:haproxy openssl:openssl npm:npm)
PATH=$PATH:/usr/sbin:/sbin

missing=()
for pair in "${needed[@]}"; do
    package=${pair##*:}
    command -v "${pair%%:*}" >/dev/null || [[ " ${missing[*]} " == *" $package "* ]] || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

install="apt-get install -y --no-install-recommends ${missing[*]}"
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    {
        echo "The integration tests run against Ceph's RADOS Gateway, over TLS and on npm's Azurite, and parts of that are not installed."
        if command -v apt-get >/dev/null; then
            echo "Run this, then 'make integration' again:"
            echo "    sudo apt-get update && sudo $install"
        else
            echo "On Debian 12 its packages are: ${missing[*]}. Put their programs on the PATH."
        fi
    } >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
$install -qq
