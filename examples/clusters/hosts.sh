#!/bin/bash
# Trains with one process on each host of a list, one per line, through ssh:
#
#   hosts.sh start lm dir=/shared/runs/lm
#   hosts.sh stop    # from another terminal: all save and end
#
# The hosts are reached without a password, and have the current directory.
set -euo pipefail

HOSTS="${HOSTS:-hosts.txt}"
WEFT="${WEFT:-weft}"       # the program on the hosts
LOGS="${LOGS:-$PWD/logs}"  # shared by the hosts, a file for each process
PORT="${PORT:-8476}"       # of the first host, which the others connect to
TRIES=3

mapfile -t hosts < <(grep -Ev '^ *(#|$)' "$HOSTS")
ssh_to=(ssh -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=30)

run_process() { # its number and the arguments of `weft train`
  local number=$1
  shift
  # On stdin, since others can read the arguments of a program.
  "${ssh_to[@]}" "${hosts[number]}" bash -s <<END
export JAX_COORDINATOR_ADDRESS=${hosts[0]#*@}:$PORT
export JAX_NUM_PROCESSES=${#hosts[@]} JAX_PROCESS_ID=$number
export WEFT_RENDEZVOUS_TOKEN=$token
cd ${PWD@Q} && mkdir -p ${LOGS@Q} && echo \$\$ > ${LOGS@Q}/$number.pid
exec ${WEFT@Q} train ${*@Q} >> ${LOGS@Q}/$number.log 2>&1 < /dev/null
END
}

start() {
  local try code session sessions token
  for ((try = 1; try <= TRIES; try++)); do
    token="$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')"
    sessions=()
    for number in "${!hosts[@]}"; do
      run_process "$number" "$@" &
      sessions+=($!)
    done
    # The highest code of all tells why they ended.
    code=0
    for session in "${sessions[@]}"; do
      local ended=0
      wait "$session" || ended=$?
      ((ended <= code)) || code=$ended
    done
    case $code in
      # Finished, a wrong command, or stopped by `hosts.sh stop`.
      0 | 2 | 130) break ;;
    esac
    echo "try $try of $TRIES ended with code $code, see $LOGS" >&2
  done
  return "$code"
}

stop() { # one process tells the others
  "${ssh_to[@]}" "${hosts[0]}" "pkill -INT -F ${LOGS@Q}/0.pid -f 'weft train'"
}

case "${1-}" in
  start | stop) "$@" ;;
  *) echo "usage: hosts.sh start RECIPE dir=DIR … | stop" >&2 && exit 2 ;;
esac
