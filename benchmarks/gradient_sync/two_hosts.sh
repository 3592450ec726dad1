#!/usr/bin/env bash
# Two hosts on one machine: runs a command on two network namespaces joined by a link, and removes them at the end.
#
#   sudo benchmarks/gradient_sync/two_hosts.sh RATE COMMAND...
#   sudo benchmarks/gradient_sync/two_hosts.sh 1gbit bash -c 'torchrun --nnodes 2 --nproc_per_node 1 --node_rank $NODE_RANK \
#     --master_addr $MASTER_ADDR --master_port $MASTER_PORT -m lightning_aigc fit -c configs/sd_lora_demo.yaml \
#     --trainer.strategy npu_sparse --trainer.num_nodes 2'
#
# RATE as tc writes it: 100mbit, 1gbit, 10gbit. Each host gets NODE_RANK, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME.
# Bytes that crossed the link, as the kernel counts them, are printed at the end. Needs root and iproute2.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 2; }
rate=$1
shift
id=$$
hosts=("try$id-a" "try$id-b")
jobs=()

running() { for host in "${hosts[@]}"; do ip netns pids "$host" 2>/dev/null || true; done; }

teardown() {
  for job in "${jobs[@]}"; do kill -- "-$job" 2>/dev/null || true; done # a group each: torchrun and its ranks
  for _ in $(seq 50); do # ranks are in sessions of their own, so they are found by their host
    [ -n "$(running)" ] || break
    sleep 0.1
  done
  running | xargs -r kill -KILL 2>/dev/null || true # torchrun waits for a host that is gone
  for host in "${hosts[@]}"; do ip netns delete "$host" 2>/dev/null || true; done
}
trap teardown EXIT
trap 'exit 130' INT TERM

for host in "${hosts[@]}"; do ip netns add "$host"; done
ip link add wire netns "${hosts[0]}" type veth peer name wire netns "${hosts[1]}"
for at in 0 1; do
  ip -n "${hosts[$at]}" address add "10.211.8.$((at + 1))/24" dev wire
  ip -n "${hosts[$at]}" link set wire up
  ip -n "${hosts[$at]}" link set lo up
  tc -n "${hosts[$at]}" qdisc add dev wire root tbf rate "$rate" burst 256kb latency 50ms
done

export MASTER_ADDR=${MASTER_ADDR:-10.211.8.1} MASTER_PORT=${MASTER_PORT:-29500} GLOO_SOCKET_IFNAME=wire
set -m # each host's command in a process group of its own
for at in 0 1; do
  NODE_RANK=$at ip netns exec "${hosts[$at]}" "$@" > >(sed -u "s/^/host $at | /") 2>&1 &
  jobs+=($!)
done
status=0
for job in "${jobs[@]}"; do wait "$job" || status=$?; done
for at in 0 1; do
  echo "host $at sent $(ip netns exec "${hosts[$at]}" cat /sys/class/net/wire/statistics/tx_bytes) bytes"
done
exit $status
