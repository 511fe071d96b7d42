#!/usr/bin/env bash
# One nightly job, for cron:
#
#     prefill-nightly.sh RECIPE [INPUT | OPTION]...
#
# Scores into out/NAME.DAY.parquet (NAME is the recipe's name) and logs to out/NAME.log. If the job stopped or failed,
# run the same line again to continue it. Ends with the exit code of prefill. Prints something, which cron mails, only if
# someone must act.
#
# SCORING_HOME     folder to run in; paths are relative to it (default: the one above this script)
# SCORING_COMMAND  the command (default: .venv/bin/prefill)
# SCORING_DAY      the day in the output's name, to finish an earlier night (default: today)
# PREFILL_SHARD    on N machines, the share of the rows that is scored here, like 2/4; log and lock have it in their names
set -uo pipefail

[ $# -ge 1 ] || { echo "usage: $0 RECIPE [INPUT | OPTION]..." >&2; exit 2; }
cd "${SCORING_HOME:-$(dirname "$0")/..}" && mkdir -p out || exit 5
recipe=$1; shift
name=$(basename "${recipe%.*}")
output=out/$name.${SCORING_DAY:-$(date +%F)}.parquet
name=$name${PREFILL_SHARD:+.shard-${PREFILL_SHARD/\//-of-}}
log=out/$name.log

# prefill locks its output, but if last night's run still goes on, it writes another output. This lock is on the open
# file. It ends with the process, however the process ends, and a file that is left behind locks nothing.
exec 9>>"out/$name.lock" || exit 5
flock --nonblock 9 || { echo "$name: the run before is still going on; this one is left out" >&2; exit 5; }

echo "$(date +%FT%T%z) $name: begins, output $output" >>"$log" || exit 5
setsid "${SCORING_COMMAND:-.venv/bin/prefill}" score --recipe "$recipe" "$@" \
    --output "$output" --resume --skip-empty --quiet >>"$log" 2>&1 &
child=$!
# A signal is passed on once, and prefill writes the finished rows before it ends. A second signal would end it at once.
# But timeout(1) sends two: one to this script, and one to the whole process group. Hence setsid, and a trap that ignores
# the next signal.
trap 'trap "" TERM INT; kill -TERM "$child" 2>/dev/null' TERM INT
wait "$child"; code=$?
while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done # the trap ended the wait, but not yet the child
echo "$(date +%FT%T%z) $name: exit code $code" >>"$log"

case $code in
    0 | 99) ;; # done; nothing to do
    3) echo "$name: $output is complete, but has too many error rows" >&2 ;;
    130 | 143) echo "$name: was stopped; the same command goes on" >&2 ;;
    *) echo "$name: failed with exit code $code" >&2 ;;
esac
case $code in
    0 | 99) ;;
    *) printf '%s\n' "--- end of $PWD/$log" >&2; tail -n 20 "$log" >&2 ;;
esac
exit "$code"
