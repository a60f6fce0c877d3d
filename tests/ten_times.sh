#!/bin/sh
# Run a command ten times in a row while other processes keep the machine busy; the first failure ends it.
#
#     sh tests/ten_times.sh 4 python -m pytest tests/solve    # beside four busy processes
#
# No test may fail because the machine is busy: no threshold on time, no sleep that has to be long enough.

load=$1
shift
busy=""
trap 'kill $busy 2>/dev/null' EXIT
trap 'exit 1' INT TERM
for _ in $(seq "$load"); do
    while :; do :; done &
    busy="$busy $!"
done

for run in 1 2 3 4 5 6 7 8 9 10; do
    echo "run $run of 10, beside $load busy processes"
    "$@" || exit 1
done
echo "green ten times in a row"
