#!/bin/bash
# run_rxe_vm.sh - run a command in a small virtual machine that has RDMA: Linux's Soft-RoCE (rdma_rxe).
#
#   test/rdma/run_rxe_vm.sh [-m MIB] [-c CPUS] [-t SECONDS] [-o FOLDER] -- COMMAND [ARGUMENT...]
#
#   -o   a folder that the guest may write, at the same path
#
# Its devices are rxe0 at 10.77.0.1 and rxe1 at 10.77.0.2, with a wire between them (v0 and v1), and rxe2 on the loopback.
#
# The guest's root is this machine's, read-only, below a layer in memory: every program and library is there at its own path,
# and what the guest writes is lost.  It has no network card.  QEMU emulates its processors, so it needs no rights, and runs
# some ten times slower than the machine.
#
# The kernel is Debian's generic one, because the kernel for clouds has no Soft-RoCE.  Its package is downloaded once and not
# installed.  It and what is made of it stay in $RXE_VM_CACHE (~/.cache/tally-rxe-vm).
#
# Exit status: the command's; 77 with a reason: this machine cannot run it; 124: it ran out of time; 125: the guest has died.
#
# What one must know of Soft-RoCE in Linux 6.1: it works in the first network name space alone.  Two ports in it need
# accept_local=1 and rp_filter=0.  The first GID of a port is fe80::, that of its IPv4 address comes behind it.  There are no more
# than 32767 completions in a queue, and 8 MB in a message.  ODP is missing.  A retry_cnt of 7 means "for ever", as with rnr_retry,
# which other cards do not do.  Work requests that are done free their places in the queue before a completion is polled.
set -euo pipefail
cd "$(dirname "$0")/../.."
cache=${RXE_VM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/tally-rxe-vm}
memory=1024 cpus=2 limit=300 out=''
while getopts m:c:t:o: option; do
    case $option in
    m) memory=$OPTARG ;;
    c) cpus=$OPTARG ;;
    t) limit=$OPTARG ;;
    o) out=$(realpath "$OPTARG") ;;
    *) exit 2 ;;
    esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' test/rdma/run_rxe_vm.sh; exit 2; }

skip() {
    echo "skipped: $*"
    exit 77
}

[ "$(uname -m)" = x86_64 ] || skip "the virtual machine is for x86-64"
for tool in qemu-system-x86_64 busybox rdma python3 dpkg-deb; do
    command -v $tool >/dev/null || skip "there is no $tool; scripts/setup.sh rdma installs it"
done
[[ $(busybox --list) == *insmod* ]] || skip "busybox lacks insmod; the package busybox-static has it"

# --- the kernel and its modules, once -----------------------------------------------------------------------

# $1: a folder.  The parts of the package that are needed; the whole takes 400 MB.
unpack_kernel() {
    dpkg-deb --fsys-tarfile "$package" | tar -x -C "$1" --wildcards './boot/vmlinuz-*' '*/modules.order' \
        '*/modules.builtin*' '*/kernel/drivers/infiniband/core/*' '*/kernel/drivers/infiniband/sw/rxe/*' \
        '*/net/ipv4/udp_tunnel.ko' '*/net/ipv6/ip6_udp_tunnel.ko' '*/kernel/net/9p/*' '*/kernel/fs/9p/*' \
        '*/kernel/fs/netfs/*' '*/kernel/fs/fscache/*' '*/kernel/fs/configfs/*' '*/kernel/fs/overlayfs/*' \
        '*/kernel/drivers/virtio/*' '*/drivers/net/veth.ko' '*/net/sched/sch_netem.ko' '*/crypto/crc32_generic.ko'
}

# $1: the folder of modules.  Prints what these need and then themselves, each once.
modules_in_order() {
    for m in virtio_pci 9pnet_virtio 9p overlay veth sch_netem crc32_generic ib_uverbs rdma_rxe; do
        awk -F'[: ]+' -v name="/$m.ko" 'substr($1, length($1) - length(name) + 1) == name {
            for (i = NF; i >= 1; i--) if ($i != "") print $i }' "$1/modules.dep"
    done | awk '!seen[$0]++'
}

make_initrd() {
    work=$cache/work
    rm -rf "$work"
    mkdir -p "$work/kernel" "$work"/root/{bin,modules,proc,sys,dev,lower,upper,newroot,job}
    unpack_kernel "$work/kernel"
    modules=$(echo "$work"/kernel/lib/modules/*)
    busybox depmod -b "$work/kernel" "$(basename "$modules")"
    modules_in_order "$modules" | while read -r file; do
        cp "$modules/$file" "$work/root/modules/"
        basename "$file" >>"$work/root/modules/order"
    done
    cp "$(command -v busybox)" "$work/root/bin/busybox"
    install -m 755 test/rdma/rxe_vm_init.sh "$work/root/init"
    # The kernel proper out of its compressed file: QEMU starts it as it is, which saves seconds of emulated xz.
    python3 - "$work"/kernel/boot/vmlinuz-* "$cache/vmlinux" <<'PY'
import lzma
import sys

data = open(sys.argv[1], "rb").read()
kernel = lzma.LZMADecompressor().decompress(data[data.index(b"\xfd7zXZ\x00"):])
open(sys.argv[2], "wb").write(kernel)
PY
    (cd "$work/root" && busybox find . | busybox cpio -o -H newc 2>/dev/null) >"$cache/initrd.new"
    mv "$cache/initrd.new" "$cache/initrd"
    rm -rf "$work"
}

mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9 # a second one waits for what the first makes
package=$(find "$cache" -name 'linux-image-*.deb' | head -n 1)
if [ -z "$package" ]; then
    name=$(apt-cache depends linux-image-amd64 2>/dev/null | awk '/Depends: linux-image-/ { print $2; exit }')
    [ -n "$name" ] || skip "no package linux-image-amd64 is listed (apt-get update lists it)"
    (cd "$cache" && apt-get -q download -o APT::Sandbox::User= "$name" >download.log 2>&1) ||
        skip "the package $name cannot be downloaded: $(tail -n 1 "$cache/download.log")"
    package=$(find "$cache" -name 'linux-image-*.deb' | head -n 1)
fi
if [ ! -s "$cache/initrd" ] || [ test/rdma/run_rxe_vm.sh -nt "$cache/initrd" ] ||
    [ test/rdma/rxe_vm_init.sh -nt "$cache/initrd" ]; then
    make_initrd
fi
exec 9>&-

# --- the command, the guest and its verdict -------------------------------------------------------------------

job=$(mktemp -d "$cache/job.XXXXXX")
trap 'rm -rf "$job"' EXIT
printf 'out=%q\n' "$out" >"$job/settings"
{
    export -p | grep -vE '^declare -x (OLDPWD|PWD|SHLVL)'
    printf 'cd %q\nexec' "$PWD"
    printf ' %q' "$@"
    echo
} >"$job/command"
folders=(-virtfs "local,path=/,mount_tag=root,security_model=none,readonly=on,multidevs=remap"
    -virtfs "local,path=$job,mount_tag=job,security_model=none,readonly=on")
[ -z "$out" ] || folders+=(-virtfs "local,path=$out,mount_tag=out,security_model=none,multidevs=remap")

set +e
timeout -k 5 "$limit" qemu-system-x86_64 -accel tcg,thread=multi -cpu max -smp "$cpus" -m "$memory" \
    -nodefaults -no-user-config -display none -nic none -no-reboot -serial stdio \
    -kernel "$cache/vmlinux" -initrd "$cache/initrd" \
    -append "console=ttyS0 quiet loglevel=4 panic=-1 nokaslr mitigations=off tsc=reliable random.trust_cpu=on" \
    "${folders[@]}" </dev/null | sed -u 's/\r$//' | tee "$job/serial" | grep --line-buffered -v '^VM-\|reboot: Power down'
status=${PIPESTATUS[0]}
[ "$status" != 124 ] || exit 124
status=$(sed -n 's/^VM-EXIT \([0-9][0-9]*\)$/\1/p' "$job/serial" | tail -n 1)
exit "${status:-125}"
