#!/usr/bin/env bash
# One nightly job, for cron:
#
#     prefill-nightly.sh RECIPE [INPUT | OPTION]...
#
# Scores into out/NAME.DAY.parquet (NAME: of the recipe) and logs to out/NAME.log. Stopped or failed, the same line goes
# on where it was. Ends with the exit code of prefill. Says something, which cron mails, only if someone must act.
#
# SCORING_HOME     folder to run in; paths start there (default: the one above this script)
# SCORING_COMMAND  the command (default: .venv/bin/prefill)
# SCORING_DAY      the day in the output's name, to finish an earlier night (default: today)
set -uo pipefail

[ $# -ge 1 ] || { echo "usage: $0 RECIPE [INPUT | OPTION]..." >&2; exit 2; }
cd "${SCORING_HOME:-$(dirname "$0")/..}" && mkdir -p out || exit 5
recipe=$1; shift
name=$(basename "${recipe%.*}")
output=out/$name.${SCORING_DAY:-$(date +%F)}.parquet
log=out/$name.log

# prefill locks its output, but last night's run, if it still goes on, writes another one. The lock is on the open file:
# it ends with the process, however that ends, and a file that is left behind locks nothing.
exec 9>>"out/$name.lock" || exit 5
flock --nonblock 9 || { echo "$name: the run before is still going on; this one is left out" >&2; exit 5; }

echo "$(date +%FT%T%z) $name: begins, output $output" >>"$log" || exit 5
setsid "${SCORING_COMMAND:-.venv/bin/prefill}" score --recipe "$recipe" "$@" \
    --output "$output" --resume --skip-empty --quiet >>"$log" 2>&1 &
child=$!
# A signal is passed on once, and prefill writes what is finished before it ends. A second one would end it at once, and
# timeout(1) sends two: to us, and to the whole process group. Hence setsid, and a trap that ignores the next.
trap 'trap "" TERM INT; kill -TERM "$child" 2>/dev/null' TERM INT
wait "$child"; code=$?
while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done # the trap ended the wait, not yet the child
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
