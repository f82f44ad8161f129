#!/usr/bin/env bash
#SBATCH --job-name=rayfed
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
# One run on the nodes of an allocation: sbatch --nodes=4 --gpus-per-node=4 deploy/slurm.sh algorithm=fedra output=PATH
# At its time limit, and when Slurm puts it back into the queue, the job goes on where its run in `output` stopped.
set -euo pipefail

port=${RAYFED_PORT:-6379}
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts[0]}
# The address of an interface: the name of a host can stand for 127.0.1.1, as Debian has it.
address=$(srun --nodes=1 --ntasks=1 -w "$head" hostname --all-ip-addresses | awk '{print $1}')

# A token of this allocation: nobody else can join its Ray. It is inherited by every srun below.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN
export RAY_USAGE_STATS_ENABLED=0
# A node that ends waits this long for its work, by default as long as Slurm waits before it kills (KillWait).
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=1
# Everybody may write into Ray's folder, but nobody else may enter the one around it.
folder=/tmp/rayfed-slurm-${SLURM_JOB_ID:-0}-${SLURM_RESTART_COUNT:-0}
ray_start="mkdir -p -m 700 $folder; until ray start --temp-dir=$folder/ray --block"

srun --nodes=1 --ntasks=1 --overlap -w "$head" \
    bash -c "$ray_start --head --node-ip-address=$address --port=$port; do exit 1; done" &
started=$!
others=
end() {
    for step in $others $started; do kill "$step" 2>/dev/null || true; done
    for step in $others $started; do wait "$step" 2>/dev/null || true; done
}
trap end EXIT
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    srun --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --overlap --exclude="$head" \
        bash -c "$ray_start --address=$address:$port; do sleep 2; done" &
    others=$!
fi

# The run starts when all nodes have joined.
srun --nodes=1 --ntasks=1 --overlap -w "$head" python - "$address:$port" "$SLURM_JOB_NUM_NODES" <<'WAIT'
import sys
import time

import ray

deadline = time.monotonic() + 300
while True:
    try:
        ray.init(address=sys.argv[1], log_to_driver=False)
        break
    except ConnectionError:
        if time.monotonic() > deadline:
            raise
        time.sleep(2)
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[2]):
    if time.monotonic() > deadline:
        sys.exit("error: not all nodes have joined Ray within 300 s")
    time.sleep(1)
WAIT

# This script runs on the head, and so does the run. Not below srun, which ends it at once with the job.
again=()
for word in "$@"; do
    if [[ $word == output=* ]]; then again=(--or-resume); fi
done
run= requeue= signalled=
end_run() {
    signalled=yes
    [ -z "$run" ] || kill -TERM "$run" 2>/dev/null || true
}
trap end_run TERM
trap 'requeue=yes; end_run' USR1
python -m rayfed.run ${again[@]+"${again[@]}"} "cluster.address=$address:$port" "$@" &
run=$!
[ -z "$signalled" ] || end_run # a signal that came before the run had a number
code=0
while true; do # a signal ends `wait`, with a code of its own, before the run ends
    signalled=
    wait "$run" && status=0 || status=$?
    [ "$status" -eq 127 ] || code=$status # 127: its code is known already
    [ -n "$signalled" ] || break
done
if [ -n "$requeue" ] && [ "${#again[@]}" -gt 0 ] && [ "$code" -eq 130 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
