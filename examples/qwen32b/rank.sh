#!/usr/bin/env bash
# One trainer rank of run.sh. USR1 means that time runs out: the trainer finishes its step, saves and
# exits with 75; until it listens it ignores USR1. SLURM signals every process of a step, so the
# trainer sees USR1 and TERM by itself, and this script only waits for it.
# Its exit code goes into a file, since srun reports only the highest of all ranks.
set -u
: "${EXIT_CODES:?run.sh sets it}" "${SLURM_PROCID:?srun sets it}"

(
  trap '' USR1
  exec python -m megatron_dapo.train "$@"
) &
trainer=$!
trap '' USR1 TERM # a trap with a command would end wait, and bash then loses the trainer's code

code=0
wait "$trainer" || code=$?
echo "$code" >"$EXIT_CODES/$SLURM_PROCID"
exit "$code"
