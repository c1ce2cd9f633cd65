#!/bin/sh
# on_soft_roce.sh - what run_rxe_vm.sh's guest tests: first as it is, then with one packet in fifty lost.
export TEST_RDMA_DEVICE=rxe0,rxe1 CMOCKA_MESSAGE_OUTPUT=TAP
smoke=build/meson/test/rdma/verbs_smoke
$smoke || status=1
tc qdisc add dev v0 root netem loss 2% || exit 1
$smoke || status=1
exit ${status:-0}
