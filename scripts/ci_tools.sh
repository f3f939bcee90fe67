#!/usr/bin/env bash
# Brings what the slower tests need beside Python and is missing: a browser for the page, Java for Spark, Ceph. Debian and Ubuntu, as root.
set -euo pipefail
install() {
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "cannot install $*: install it by hand, or the tests that need it are skipped" >&2
        return 0
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}
command -v chromium >/dev/null || install chromium
command -v java >/dev/null || [ -n "${JAVA_HOME:-}" ] || install default-jre-headless
# A second S3 server, where a program that starts it was named.
if [ -n "${PHALANX_CEPH_RGW:-}" ] && ! command -v radosgw >/dev/null; then
    install ceph-mon ceph-mgr ceph-osd ceph-common radosgw uuid-runtime curl || echo "no Ceph here: its tests are skipped" >&2
fi
