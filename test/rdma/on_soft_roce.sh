#!/bin/bash
# on_soft_roce.sh - what run_rxe_vm.sh's guest tests, in TAP: verbs, links and whole jobs, also with packets lost and a link that
# goes down.  Everything is some ten times slower there.
export CMOCKA_MESSAGE_OUTPUT=TAP TEST_RDMA=1 TALLY_LOG=info
# Programs that are linked with the fake card's library find the real one first.
LD_LIBRARY_PATH=$(dirname "$(ldconfig -p | awk '$1 == "libibverbs.so.1" { print $NF; exit }')")
export LD_LIBRARY_PATH
status=0
log=/tmp/job.log

# $1: what the test is called; the rest: a command that ends well, and whose log says that it has begun by RDMA.
job() {
    name=$1
    shift
    if "$@" >$log 2>&1 && grep -q 'rdma to' $log; then
        echo "ok - $name"
    else
        echo "not ok - $name"
        sed 's/^/# /' $log
        status=1
    fi
}

without_tcp() {
    "$@" && ! grep 'TCP takes its place' $log
}

# The ranks of a job at the two ends of the wire.
over_the_wire() {
    for rank in 0 1; do
        RANK=$rank LOCAL_RANK=0 WORLD_SIZE=2 TALLY_COORD=10.77.0.1:5555 TALLY_SECRET=of-both-ranks-of-this-job \
            TALLY_IFACE=v$rank TALLY_HOST_ID=host$rank timeout 200 build/meson/test/jobs/every_operation &
    done
    wait -n && wait -n
}

# A send meets no route meanwhile, which ends its connection, and TCP takes over; or it waits.
with_a_link_that_goes_down() {
    over_the_wire &
    ranks=$!
    until grep -q 'rdma to' $log || ! kill -0 $ranks; do sleep 0.2; done
    ip link set v1 down
    sleep 2
    ip link set v1 up
    wait $ranks
}

verbs() {
    TEST_RDMA_DEVICE=rxe0,rxe1 build/meson/test/rdma/verbs_smoke || status=1
}

echo 1..3
verbs
build/meson/conformance_test || status=1
build/meson/test/rdma_medium_test || status=1
# Recovery: a tallyd is killed while others write to it.
TEST_ONE=test_one_killed TEST_TALLYD=build/meson/src/tallyd/tallyd timeout 200 build/meson/test/service_epoch_test || status=1
job "two ranks and a tallyd" without_tcp timeout 200 build/bin/tally run -n 2 -k 1 -- build/meson/test/jobs/every_operation
job "a link that goes down" with_a_link_that_goes_down
tc qdisc add dev v0 root netem loss 2% || status=1
verbs
tc qdisc change dev v0 root netem loss 0.5% || status=1
job "packets are lost" without_tcp over_the_wire
exit $status
