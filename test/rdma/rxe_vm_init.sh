#!/bin/busybox sh
# rxe_vm_init.sh - the first process of run_rxe_vm.sh's guest: loads the modules, mounts the host's root, sets up RDMA, runs
# the command, says its exit status and powers off.
export PATH=/tools:/bin
/bin/busybox mkdir -p /tools
/bin/busybox --install -s /tools
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys

finish() {
    echo "VM-EXIT $1"
    sync
    poweroff -f
}

while read -r module; do
    insmod "/modules/$module" || echo "VM cannot load $module"
done </modules/order

new=/newroot
options=trans=virtio,version=9p2000.L,msize=262144
mount -t 9p -o "$options,ro,cache=loose" root /lower || finish 126
mount -t tmpfs -o mode=755 memory /upper
mkdir /upper/files /upper/work
mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work overlay $new || finish 126
for folder in proc sys dev; do mount --rbind /$folder $new/$folder; done
mkdir -p $new/dev/shm $new/dev/pts
mount -t tmpfs -o mode=1777 memory $new/dev/shm
mount -t devpts pts $new/dev/pts
mount -t tmpfs memory $new/run
mount -t 9p -o "$options,ro" job /job || finish 126
. /job/settings
# shellcheck disable=SC2154 # the settings
[ -z "$out" ] || { mkdir -p "$new$out" && mount -t 9p -o "$options,cache=none" out "$new$out"; }

hostname rxe-vm
ulimit -l unlimited
ip link set lo up
host() { chroot $new /usr/bin/env PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"; }
sysctl -q -w net.ipv6.conf.default.accept_dad=0
host ip link add v0 type veth peer name v1
for i in 0 1; do
    ip addr add 10.77.0.$((i + 1))/24 dev v$i
    ip link set v$i mtu 4200 up
    # Packets from an address of our own come in by the wire.
    echo 1 >/proc/sys/net/ipv4/conf/v$i/accept_local
    echo 0 >/proc/sys/net/ipv4/conf/v$i/rp_filter
done
echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
for i in 0 1; do host rdma link add rxe$i type rxe netdev v$i || finish 126; done
host rdma link add rxe2 type rxe netdev lo || finish 126

cp /job/command $new/run/command
chroot $new /bin/bash /run/command
finish $?
