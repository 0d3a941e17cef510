#!/usr/bin/env bash
# One trainer rank of run.sh. USR1 and TERM mean that time runs out: all trainers save and exit with
# 75; until one listens it ignores them, and run.sh asks again. SLURM signals every process of a
# step, so the trainer sees them by itself, and this script only waits for it.
# Its exit code goes into a file, since srun reports only the highest of all ranks.
set -u
: "${EXIT_CODES:?run.sh sets it}" "${SLURM_PROCID:?srun sets it}"

(
  trap '' USR1 TERM
  exec python -m megatron_dapo.train "$@"
) &
trainer=$!
trap '' USR1 TERM # a trap with a command would end wait, and bash then loses the trainer's code

code=0
wait "$trainer" || code=$?
echo "$code" >"$EXIT_CODES/$SLURM_PROCID"
exit "$code"
