#!/bin/bash
# Trains with one process on each host of a TPU slice, which is requested first:
#
#   tpu-slice.sh start lm dir=/shared/runs/lm
#   tpu-slice.sh stop      # from another terminal: all save and end
#   tpu-slice.sh release   # gives the slice back
#
# A file server with the environment, the runs and the logs is mounted at /shared.
set -euo pipefail

NAME="${NAME:-weft}"
ZONE="${ZONE:-us-west4-a}"
TYPE="${TYPE:-v5litepod-16}"
RUNTIME="${RUNTIME:-v2-alpha-tpuv5-lite}"
FILE_SERVER="${FILE_SERVER:-10.0.0.2:/shared}"
WEFT="${WEFT:-/shared/venv/bin/weft}"
LOGS="${LOGS:-/shared/logs/$NAME}"  # a file for each process
PORT="${PORT:-8476}"                # of the first host, for the others
TRIES=20

tpus() { gcloud compute tpus "$@" --zone="$ZONE"; }

on_workers() { # "all" or a number, and a command
  tpus tpu-vm ssh "$NAME" --worker="$1" --batch-size=all --command="$2"
}

request() { # without --spot, a slice that is not preempted
  local mount token
  mount="apt-get install -qy nfs-common; mkdir -p /shared; mount $FILE_SERVER /shared"
  token="$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')"
  tpus queued-resources create "$NAME" --node-id="$NAME" \
    --accelerator-type="$TYPE" --runtime-version="$RUNTIME" --spot \
    --metadata="startup-script=$mount,rendezvous-token=$token"
}

release() { tpus queued-resources delete "$NAME" --force --quiet; }

await_slice() {
  local state
  while true; do
    state="$(tpus queued-resources list --filter="name~/$NAME\$" \
      --format='value(state.state)')"
    case $state in
      ACTIVE) break ;;
      "") request ;;
      FAILED)
        echo "$NAME was refused: gcloud compute tpus queued-resources describe" >&2
        return 1
        ;;
      SUSPENDED) release ;; # it was preempted
      *) sleep 30 ;;
    esac
  done
}

# The next two functions run on the hosts.

metadata() {
  curl -sf -H 'Metadata-Flavor: Google' \
    "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}

train() {
  local hosts first commas token
  hosts="$(metadata worker-network-endpoints)" # one,two or a:b:one,c:d:two
  first="${hosts%%,*}"
  commas="${hosts//[^,]/}"
  export JAX_COORDINATOR_ADDRESS="${first##*:}:$PORT"
  export JAX_NUM_PROCESSES=$((${#commas} + 1))
  JAX_PROCESS_ID="$(metadata agent-worker-number)"
  WEFT_RENDEZVOUS_TOKEN="$(metadata rendezvous-token)"
  export JAX_PROCESS_ID WEFT_RENDEZVOUS_TOKEN
  until [ -x "$WEFT" ]; do sleep 5; done # until /shared is mounted
  mkdir -p "$LOGS"
  echo $$ > "$LOGS/$JAX_PROCESS_ID.pid"
  exec "$WEFT" train "$@" >> "$LOGS/$JAX_PROCESS_ID.log" 2>&1
}

start() {
  local try code command
  command="PORT=$PORT WEFT=${WEFT@Q} LOGS=${LOGS@Q}
$(declare -f metadata train)
train ${*@Q}"
  for ((try = 1; try <= TRIES; try++)); do
    await_slice
    code=0
    on_workers all "$command" || code=$?
    case $code in
      # Finished, a wrong command, or stopped by `tpu-slice.sh stop`.
      0 | 2 | 130) break ;;
    esac
    echo "try $try of $TRIES ended with code $code, see $LOGS" >&2
    sleep 30 # until a preemption is known
  done
  return "$code"
}

stop() { # one process tells the others
  on_workers 0 "pkill -INT -F ${LOGS@Q}/0.pid -f 'weft train'"
}

case "${1-}" in
  start | stop | release) "$@" ;;
  *) echo "usage: tpu-slice.sh start RECIPE dir=DIR … | stop | release" >&2 && exit 2 ;;
esac
