#!/usr/bin/env bash
# One trainer rank of run.sh. SLURM signals every process of a step, so the trainer sees TERM by
# itself; USR1, which means that time runs out, it ignores, and gets one TERM from here instead.
# Its exit code goes into a file, since srun reports only the highest of all ranks.
set -u
: "${EXIT_CODES:?run.sh sets it}" "${SLURM_PROCID:?srun sets it}"

(
  trap '' USR1
  exec python -m megatron_dapo.train "$@"
) &
trainer=$!
trap 'trap "" USR1; kill -TERM "$trainer" 2>/dev/null' USR1
trap : TERM

code=0
wait "$trainer" || code=$?
while kill -0 "$trainer" 2>/dev/null; do # a signal ends wait, not the trainer
  code=0
  wait "$trainer" || code=$?
done
echo "$code" >"$EXIT_CODES/$SLURM_PROCID"
exit "$code"
