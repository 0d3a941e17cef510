#!/usr/bin/env bash
# Train on a SLURM cluster, from the repository's root:
#   MODEL=/models/Qwen2.5-32B TRAIN_DATA=/data/dapo_math_17k.parquet sbatch examples/qwen32b/run.sh
#   sbatch examples/qwen32b/run.sh examples/qwen32b/ablation/clip_higher.yaml optimizer.lr=2e-6
#   sbatch --nodes=4 --ntasks-per-node=1 --gpus-per-node=0 \
#     examples/qwen32b/run.sh examples/qwen32b/cpu_smoke.yaml
#
# Arguments: a configuration file (examples/qwen32b/dapo.yaml), then overrides, section.key=value.
# The job has parallel.nodes machines of trainers, the first ones, and rollout.engine_nodes machines
# of engines. From the environment:
#   MODEL, TRAIN_DATA, HELDOUT_DATA   read by the shipped configurations
#   VENV            virtual environment on every node, .venv
#   IMAGE           container (pyxis) instead of VENV; MOUNTS adds host:container pairs to it
#   ENGINE_COMMAND  starts the engines of rollout.endpoints, in a step of its own on the first
#                   node. Empty: trainer rank 0 starts rollout.engines engines there.
#   MAX_RESTARTS    times that a pre-empted run is queued again, 100
#   MAX_CRASHES     crashes in a row after which it is not, 1: only pre-empted runs are
# Secrets (WANDB_API_KEY, HF_TOKEN) come from the environment or netrc, and are never printed.
#
#SBATCH --job-name=megatron-dapo
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
set -euo pipefail

readonly EXIT_CRASH=1 EXIT_PREEMPTED=75 EXIT_CONFIG=78
: "${SLURM_JOB_ID:?start this script with sbatch}"
cd "${SLURM_SUBMIT_DIR:-$PWD}"
CONFIG=${CONFIG:-examples/qwen32b/dapo.yaml}
if [[ ${1:-} == *.y?(a)ml ]]; then
  CONFIG=$1
  shift
fi
attempt=${SLURM_RESTART_COUNT:-0}
overrides=("$@")
trainer_pid="" engine_pid="" token_file="" stopping="" step_code=""

say() { echo "run.sh: $*"; }
refuse() {
  say "$*" >&2
  exit "$EXIT_CONFIG"
}

[[ -f examples/qwen32b/rank.sh ]] ||
  refuse "$PWD holds no examples/qwen32b/rank.sh: submit this script from the repository's root"
for name in MAX_RESTARTS MAX_CRASHES; do
  [[ ${!name:-1} =~ ^(0|[1-9][0-9]*)$ ]] || refuse "$name=${!name}: must be a whole number"
done

container=()
if [[ -n ${IMAGE:-} ]]; then
  container=(
    "--container-image=$IMAGE"
    "--container-mounts=$PWD:$PWD${MOUNTS:+,$MOUNTS}"
    "--container-workdir=$PWD"
    --no-container-mount-home
  )
else
  VENV=${VENV:-.venv}
  [[ -x $VENV/bin/python ]] || refuse "VENV=$VENV holds no Python: run 'make install' or set IMAGE"
  VENV=$(realpath "$VENV")
  export PATH=$VENV/bin:$PATH
fi

on_this_node() {
  if [[ -n ${IMAGE:-} ]]; then
    srun --overlap --nodes=1 --ntasks=1 "${container[@]}" "$@"
  else
    "$@"
  fi
}

# ---- before anything starts: the configuration, the allocation, the shared file system
preflight() {
  local facts seen free
  on_this_node python -m megatron_dapo.cli.main train "$CONFIG" "${overrides[@]}" --dry-run ||
    refuse "the configuration is refused; nothing was started"
  facts=$(on_this_node python -m megatron_dapo.planning.job "$SLURM_JOB_ID" "$CONFIG" \
    "${overrides[@]}")
  # RUN_DIR DEVICE NODES RANKS_PER_NODE CHECKPOINT_GIB MASTER_PORT
  # ENGINE_NODES ENGINES ENGINE_DEVICES ENGINE_PORT
  eval "$facts"
  export MASTER_PORT
  [[ $SLURM_JOB_NUM_NODES == $((NODES + ENGINE_NODES)) ]] ||
    refuse "the job has $SLURM_JOB_NUM_NODES nodes, parallel.nodes is $NODES and" \
      "rollout.engine_nodes is $ENGINE_NODES: change one of them"
  engines_per_node=$((ENGINE_NODES > 0 ? ENGINES / ENGINE_NODES : 0))
  local gpus=${SLURM_GPUS_ON_NODE:-0} wanted=$RANKS_PER_NODE
  ((engines_per_node * ENGINE_DEVICES <= wanted)) || wanted=$((engines_per_node * ENGINE_DEVICES))
  [[ $DEVICE != cuda || $gpus -ge $wanted ]] ||
    refuse "$gpus GPUs a node, $wanted ranks or engine ranks a node: --gpus-per-node"

  LOGS=$RUN_DIR/logs/attempt_$attempt
  export EXIT_CODES=$LOGS/exit_codes
  mkdir -p "$EXIT_CODES"
  find "$EXIT_CODES" -type f -delete
  ulimit -S -n "$(ulimit -H -n)"
  local canary=$LOGS/canary
  rm -rf "$canary"
  mkdir "$canary"
  # shellcheck disable=SC2016 # $1 and $SLURM_NODEID are those of each node
  srun --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \
    --ntasks-per-node=1 bash -c 'test -d "$1" && touch "$1/$SLURM_NODEID"' canary "$canary" || true
  seen=$(find "$canary" -type f | wc -l)
  [[ $seen == "$SLURM_JOB_NUM_NODES" ]] ||
    refuse "run_dir=$RUN_DIR is shared with $seen of $SLURM_JOB_NUM_NODES nodes: put it on a" \
      "shared file system"
  free=$(df --output=avail -B1G "$RUN_DIR" | tail -n 1)
  [[ $free -ge $((2 * CHECKPOINT_GIB)) ]] ||
    refuse "$free GiB free for $RUN_DIR, two checkpoints need $((2 * CHECKPOINT_GIB)) GiB"
}

# ---- signals: time runs out (USR1) or the job is pre-empted (TERM)
forward() {
  [[ -z $step_code ]] || return 0 # the trainers have ended: it comes of being queued again
  stopping=$1
  say "received $1: asking the trainer to save and stop"
  [[ -z $trainer_pid ]] || remind &
}
remind() { # a trainer that does not listen yet would miss it; asked again, one that does goes on
  while kill -USR1 "$trainer_pid" 2>/dev/null; do sleep 5; done
}
trap 'forward USR1' USR1
trap 'forward TERM' TERM

wait_for() { # PID: its exit code, however many signals arrive meanwhile
  local code=0
  wait "$1" || code=$?
  while kill -0 "$1" 2>/dev/null; do
    code=0
    wait "$1" || code=$?
  done
  return "$code"
}

# ---- the two steps
address_of() { # NODE: where others reach it
  local address
  address=$(scontrol show node "$1" --oneliner | grep -o 'NodeAddr=[^ ]*') || true
  address=${address#NodeAddr=}
  echo "${address:-$1}"
}

start_engine_nodes() { # their endpoints and token become overrides of the trainers
  [[ $ENGINE_NODES -gt 0 ]] || return 0
  local host index addresses=() endpoints=()
  for host in "${hosts[@]:NODES}"; do addresses+=("$(address_of "$host")"); done
  for ((index = 0; index < ENGINES; index++)); do
    endpoints+=("http://${addresses[index / engines_per_node]}:$((ENGINE_PORT + index))")
  done
  token_file=$LOGS/engine_token
  (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$token_file")
  overrides+=("rollout.token_file=$token_file" "rollout.endpoints=[$(join "${endpoints[@]}")]")
  srun --overlap --nodes="$ENGINE_NODES" --nodelist="$(join "${hosts[@]:NODES}")" \
    --ntasks="$ENGINES" --ntasks-per-node="$engines_per_node" "${container[@]}" \
    --output="$LOGS/engine_%t.log" python -m megatron_dapo.rollout.serve \
    --hosts "$(join "${addresses[@]}")" --first-port "$ENGINE_PORT" \
    --config "$CONFIG" "${overrides[@]}" &
  engine_pid=$!
}

join() { local IFS=,; echo "$*"; }

stop_engines() { # engines serve as long as their token is there
  [[ -z $token_file ]] || rm -f "$token_file"
  [[ -n $engine_pid ]] || return 0
  local tries=60
  [[ -n $token_file ]] || tries=0
  while ((tries-- > 0)) && kill -0 "$engine_pid" 2>/dev/null; do sleep 0.5; done
  kill -TERM "$engine_pid" 2>/dev/null || true
}

start_engines() {
  start_engine_nodes
  [[ -n ${ENGINE_COMMAND:-} ]] || return 0
  srun --overlap --nodes=1 --nodelist="${hosts[0]}" --ntasks=1 "${container[@]}" \
    --output="$LOGS/engines.log" bash -c "$ENGINE_COMMAND" &
  engine_pid=$!
}

start_trainer() {
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron overlaps tensor-parallel communication by it
  srun --overlap --kill-on-bad-exit=1 --nodes="$NODES" --nodelist="$(join "${hosts[@]:0:NODES}")" \
    --ntasks-per-node="$RANKS_PER_NODE" --ntasks=$((NODES * RANKS_PER_NODE)) "${container[@]}" \
    --output="$LOGS/trainer_%t.log" \
    bash examples/qwen32b/rank.sh --config "$CONFIG" "${overrides[@]}" &
  trainer_pid=$!
}

# ---- the exit code of the run, from those of the ranks
run_code() {
  local code result=0
  while read -r code; do
    case $code in
      0) ;;
      "$EXIT_CONFIG") echo "$EXIT_CONFIG" && return ;;
      "$EXIT_PREEMPTED") [[ $result != 0 ]] || result=$EXIT_PREEMPTED ;;
      137 | 143) [[ $result != 0 ]] || result=$code ;; # ended by srun because another one failed
      *) result=$EXIT_CRASH ;;
    esac
  done < <(cat "$EXIT_CODES"/* 2>/dev/null)
  case $result in
    137 | 143)
      result=$EXIT_CRASH
      ! grep -qx "$EXIT_PREEMPTED" "$EXIT_CODES"/* || result=$EXIT_PREEMPTED
      ;;
  esac
  echo "$result"
}

show_first_failure() {
  local file
  file=$(grep -Lx -e 0 -e "$EXIT_PREEMPTED" -e 143 -e 137 "$EXIT_CODES"/* 2>/dev/null | head -n 1)
  [[ -n $file ]] || return 0
  say "rank ${file##*/} failed with code $(cat "$file"); last lines of its log:" >&2
  tail -n 25 "$LOGS/trainer_${file##*/}.log" >&2 || true
}

requeue() {
  # A job that SLURM is ending (cancelled, queued again, out of time) is COMPLETING by now.
  if [[ $(scontrol show job "$SLURM_JOB_ID" --oneliner) != *JobState=RUNNING* ]]; then
    say "SLURM is ending this job by itself: not queued again from here"
    return
  fi
  say "queued again (restart $((attempt + 1)))"
  scontrol requeue "$SLURM_JOB_ID" || say "SLURM did not queue it again"
}

finish() { # CODE: what becomes of the job
  local crashes=$RUN_DIR/crashes
  case $1 in
    0) rm -f "$crashes" ;;
    "$EXIT_PREEMPTED")
      rm -f "$crashes"
      if [[ $attempt -lt ${MAX_RESTARTS:-100} ]]; then
        requeue
      else
        say "saved, but queued again $attempt times already: submit it anew to go on"
      fi
      ;;
    "$EXIT_CONFIG") say "bad configuration or data: not queued again" >&2 ;;
    *)
      echo "attempt $attempt" >>"$crashes"
      show_first_failure
      if [[ $(wc -l <"$crashes") -lt ${MAX_CRASHES:-1} ]]; then
        requeue
      else
        say "$(wc -l <"$crashes") crashes in a row: not queued again. Logs: $LOGS" >&2
      fi
      ;;
  esac
}

preflight
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=$(address_of "${hosts[0]}")
export MASTER_ADDR
say "attempt $attempt of job $SLURM_JOB_ID on $NODES nodes; logs in $LOGS"
start_engines
start_trainer
[[ -z $stopping ]] || forward "$stopping" # a signal that came before there was a trainer
wait_for "$trainer_pid" && step_code=0 || step_code=$?
stop_engines
code=$(run_code)
[[ $code != 0 || $step_code == 0 ]] || code=$EXIT_CRASH # a rank that never wrote its code
say "trainers ended with $code (srun: $step_code)"
finish "$code"
exit "$code"
