#!/usr/bin/env bash
# A SLURM cluster of one node, this machine: for tests and for trying batch scripts out. Needs root and Debian's apt-get.
#
#   bash scripts/slurm_node.sh start DIR    install slurm-wlm and munge if they are absent; start munged, slurmctld, slurmd
#   SLURM_CONF=DIR/slurm.conf srun -n 2 hostname
#   bash scripts/slurm_node.sh stop DIR     end them
#
# DIR gets the key, slurm.conf, logs and state; all listen on 127.0.0.1 alone. There are no cgroups.
set -euo pipefail

[ $# -eq 2 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ "$(id -u)" = 0 ] || { echo "error: slurm_node.sh needs root" >&2; exit 2; }
action="$1"
mkdir -p "$2"
dir="$(cd "$2" && pwd)"
export SLURM_CONF="$dir/slurm.conf"
PATH="$PATH:/usr/sbin:/sbin"

install_packages() {
  if ! command -v slurmctld >/dev/null || ! command -v slurmd >/dev/null || ! command -v munged >/dev/null; then
    apt-get update -qq
    # Their own services are not started: policy-rc.d is for the time of the installation alone.
    local policy=/usr/sbin/policy-rc.d
    [ -e "$policy" ] || { printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod +x "$policy" && trap "rm -f $policy" EXIT; }
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge >"$dir/apt.log" 2>&1
  fi
}

free_port() {
  python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

write_configuration() {
  umask 077
  chmod 755 "$dir"
  mkdir -p "$dir/munge" "$dir/state" "$dir/spool"
  head -c 128 /dev/urandom >"$dir/munge/key"
  umask 022
  cat >"$SLURM_CONF" <<CONF
ClusterName=one
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmUser=root
SlurmctldPort=$(free_port)
SlurmdPort=$(free_port)
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
KillWait=10
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
NodeName=$(hostname -s) NodeAddr=127.0.0.1 CPUs=16 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
}

start() {
  install_packages
  write_configuration
  munged --force --key-file="$dir/munge/key" --socket="$dir/munge.socket" --pid-file="$dir/munged.pid" \
    --log-file="$dir/munge/munged.log" --seed-file="$dir/munge/seed"
  slurmctld
  slurmd
  for _ in $(seq 60); do
    [ "$(sinfo -h -o %T 2>/dev/null)" = idle ] && return
    sleep 0.5
  done
  echo "error: the node does not get ready; logs in $dir" >&2
  tail -n 5 "$dir"/slurmctld.log "$dir"/slurmd.log >&2
  stop
  return 1
}

stop() {
  local name pid
  for name in slurmd slurmctld munged; do
    pid="$(cat "$dir/$name.pid" 2>/dev/null)" || continue
    kill "$pid" 2>/dev/null || continue
    for _ in $(seq 40); do
      kill -0 "$pid" 2>/dev/null || break
      sleep 0.25
    done
    kill -9 "$pid" 2>/dev/null || true
  done
}

case "$action" in
  start | stop) "$action" ;;
  *) echo "error: expected start or stop, got $action" >&2; exit 2 ;;
esac
