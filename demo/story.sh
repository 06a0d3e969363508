#!/usr/bin/env bash
# Shows in a tmux session what the dashboard is for: a real job gets a fault, the overview names it, the fault goes away,
# and so does the verdict. Prints each verdict. Needs tmux and `make install`; takes about two minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
BIN=$PWD/.venv/bin
DDPWATCH_DIR=$(mktemp -d)
export DDPWATCH_DIR OMP_NUM_THREADS=1
fault=$DDPWATCH_DIR/fault
session=ddpwatch-story-$$
job=

clean_up() {
    echo stop >"$fault"
    tmux kill-session -t "$session" 2>/dev/null || true
    if [ -n "$job" ]; then wait "$job" || true; fi
    rm -rf "$DDPWATCH_DIR"
}
trap clean_up EXIT

start() { # options of the job
    echo none >"$fault"
    "$BIN/torchrun" --standalone --nproc-per-node=2 demo/story_job.py "$fault" "$@" >"$DDPWATCH_DIR/job.log" 2>&1 &
    job=$!
}
screen() { tmux capture-pane -p -t "$session"; }
step() { screen | head -1 | grep -o 'step [0-9]*' | tail -1 | cut -d' ' -f2; }
verdict() { screen | awk 'NR == 3 || (NR > 3 && /^   [^ ]/) { sub(/^ */, ""); printf "%s ", $0; next } NR > 3 { exit }'; }
until_verdict() { # extended regular expression; gives up after two minutes
    for _ in $(seq 480); do
        if verdict | grep -qE "$1"; then return; fi
        sleep 0.25
    done
    echo "no such verdict: $1" >&2
    screen >&2
    exit 1
}
show() { # what was changed, the expected verdict
    local before
    before=$(step)
    until_verdict "$2"
    printf '\n%s, and %s steps later:\n  %s\n' "$1" "$(($(step) - before))" "$(verdict)"
}

start
tmux new-session -d -s "$session" -x 160 -y 45 "DDPWATCH_DIR=$DDPWATCH_DIR $BIN/ddpwatch"
until_verdict 'stands out|exposed|late'
until [ "$(step)" -ge 300 ]; do sleep 0.5; done
tmux send-keys -t "$session" 7 && sleep 1
printf 'nothing injected, %s steps: %s\n' "$(step)" "$(screen | grep -o 'incidents [0-9]*' | head -1)"
tmux send-keys -t "$session" 1 && sleep 1
printf '  %s\n' "$(verdict)"

echo slow-backward >"$fault"
show 'rank 1 takes 200 ms more in its backward' 'rank 1 is late by [0-9]{3} ms.*backward'
screen | sed -n '4,24p'
echo none >"$fault"
show 'the cause is removed' 'stands out|exposed'
echo slow-input >"$fault"
show 'rank 0 takes 100 ms more in its input' 'rank 0 is late.*wait for data'
echo stop >"$fault"
wait "$job"

start --wide
until_verdict 'exposed.*last bucket'
printf '\na job whose last bucket is 64 MiB:\n  %s\n' "$(verdict)"
