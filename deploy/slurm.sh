#!/usr/bin/env bash
#SBATCH --job-name=rayfed
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
# One run on the nodes of an allocation: sbatch --nodes=4 --gpus-per-node=4 deploy/slurm.sh algorithm=fedra rounds=5
set -euo pipefail

port=${RAYFED_PORT:-6379}
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts[0]}
address=$(srun --nodes=1 --ntasks=1 -w "$head" hostname --ip-address | awk '{print $1}')

# A token of this allocation: nobody else can join its Ray. It is inherited by every srun below.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN

srun --nodes=1 --ntasks=1 --overlap -w "$head" \
    ray start --head --node-ip-address="$address" --port="$port" --block &
started=$!
trap 'kill "$started" ${others:-} 2>/dev/null || true' EXIT
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    srun --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --overlap --exclude="$head" \
        bash -c "until ray start --address=$address:$port --block; do sleep 2; done" &
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

# A job that Slurm has requeued continues the run that it finds in its folder.
for word in "$@"; do
    if [[ $word == output=* && -f ${word#output=}/config.yaml ]]; then
        srun --nodes=1 --ntasks=1 --overlap -w "$head" \
            python -m rayfed.resume "${word#output=}" "cluster.address=$address:$port"
        exit
    fi
done
srun --nodes=1 --ntasks=1 --overlap -w "$head" python -m rayfed.run "cluster.address=$address:$port" "$@"
