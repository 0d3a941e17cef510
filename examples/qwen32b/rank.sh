#!/usr/bin/env bash
# One trainer rank of run.sh. USR1 (time runs out) and TERM (pre-emption) both reach the trainer
# as one TERM; its exit code goes into a file, since srun reports only the highest of all ranks.
set -u
: "${EXIT_CODES:?run.sh sets it}" "${SLURM_PROCID:?srun sets it}"

python -m megatron_dapo.train "$@" &
trainer=$!
trap 'kill -TERM "$trainer" 2>/dev/null' USR1 TERM

code=0
wait "$trainer" || code=$?
while kill -0 "$trainer" 2>/dev/null; do # a signal ends wait, not the trainer
  code=0
  wait "$trainer" || code=$?
done
echo "$code" >"$EXIT_CODES/$SLURM_PROCID"
exit "$code"
