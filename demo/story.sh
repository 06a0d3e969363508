#!/usr/bin/env bash
# The story that the dashboard is for, in a tmux session: a real job gets into trouble, the overview says which, and that
# it is over. Prints what the overview says. Needs tmux and `make install`; takes about two minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
BIN=$PWD/.venv/bin
DDPWATCH_DIR=$(mktemp -d)
export DDPWATCH_DIR OMP_NUM_THREADS=1
trouble=$DDPWATCH_DIR/trouble
session=ddpwatch-story-$$
job=

leave() {
    echo stop >"$trouble"
    tmux kill-session -t "$session" 2>/dev/null || true
    if [ -n "$job" ]; then wait "$job" || true; fi
    rm -rf "$DDPWATCH_DIR"
}
trap leave EXIT

start() { # options of the job
    echo none >"$trouble"
    "$BIN/torchrun" --standalone --nproc-per-node=2 demo/story_job.py "$trouble" "$@" >"$DDPWATCH_DIR/job.log" 2>&1 &
    job=$!
}
screen() { tmux capture-pane -p -t "$session"; }
step() { screen | head -1 | grep -o 'step [0-9]*' | tail -1 | cut -d' ' -f2; }
verdict() { screen | awk 'NR == 3 || (NR > 3 && /^   [^ ]/) { sub(/^ */, ""); printf "%s ", $0; next } NR > 3 { exit }'; }
until_it_says() { # extended regular expression; gives up after two minutes
    for _ in $(seq 480); do
        if verdict | grep -qE "$1"; then return; fi
        sleep 0.25
    done
    echo "it never said: $1" >&2
    screen >&2
    exit 1
}
tell() { # what is done, what it has to say
    local before
    before=$(step)
    until_it_says "$2"
    printf '\n%s, and %s steps later:\n  %s\n' "$1" "$(($(step) - before))" "$(verdict)"
}

start
tmux new-session -d -s "$session" -x 160 -y 45 "DDPWATCH_DIR=$DDPWATCH_DIR $BIN/ddpwatch"
until_it_says 'hidden|exposed|late'
until [ "$(step)" -ge 300 ]; do sleep 0.5; done
tmux send-keys -t "$session" 7 && sleep 1
printf 'nothing injected, %s steps: %s\n' "$(step)" "$(screen | grep -o 'findings [0-9]*' | tail -1)"
tmux send-keys -t "$session" 1 && sleep 1
printf '  %s\n' "$(verdict)"

echo slow-backward >"$trouble"
tell 'rank 1 gets 200 ms in its backward' 'rank 1 is late.* [0-9]{3} ms after.*backward'
screen | sed -n '4,24p'
echo none >"$trouble"
tell 'the cause is removed' 'hidden|exposed'
echo slow-input >"$trouble"
tell 'rank 0 gets 100 ms in its input' 'rank 0 is late.*input'
echo stop >"$trouble"
wait "$job"

start --wide
until_it_says 'exposed.*last bucket'
printf '\na job whose last bucket is 64 MiB:\n  %s\n' "$(verdict)"
