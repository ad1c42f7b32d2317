# Functions of .ci/run and .ci/full; they source it at the root of the tree.

# The README's second command, word for word.
TEST_COMMAND="python3 -m venv .venv && . .venv/bin/activate && \
pip install -e '.[test]' && python -m pytest"
# What the second Python tests on every change.
SMOKE=(tests/structure tests/core tests/objectives)
TIMES=()

# stage TITLE COMMAND...: runs a command, ends the script when it fails, and
# notes the seconds it took.
stage() {
  local title=$1 start=$SECONDS
  shift
  echo "== $title"
  "$@" || { echo "== failed: $title"; exit 1; }
  TIMES+=("$(printf '%5d s  %s' $((SECONDS - start)) "$title")")
}

summary() {
  printf '%s\n' '== seconds per stage' "${TIMES[@]}"
}

# copy_tree FOLDER: copies all files that git does not ignore.
copy_tree() {
  mkdir -p "$1"
  git ls-files -z --cached --others --exclude-standard |
    while IFS= read -r -d '' file; do
      [[ ! -e "$file" ]] || printf '%s\0' "$file"
    done | tar -c --null -T - | tar -x -C "$1"
}

# environment PYTHON: makes .venv here with this project and its test extra.
environment() {
  "$1" -m venv .venv && .venv/bin/python -m pip install -q -e '.[test]'
}

# marked_tests MARK: runs the tests of a mark, if there are any.
marked_tests() {
  if ! grep -rqE "mark\.$1\b" --include='*.py' tests; then
    echo "no test is marked $1"
    return 0
  fi
  local code=0
  python -m pytest -m "$1" || code=$?
  [[ $code == 0 || $code == 5 ]]
}

# second_python: prints the path of a Python 3.12, or fails.
second_python() {
  local python
  for python in ~/.pyenv/versions/3.12*/bin/python python3.12; do
    if "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' \
      2> /dev/null; then
      echo "$python"
      return 0
    fi
  done
  return 1
}

# quickstart SEED FOLDER: runs the README's main job and checks what it claims.
quickstart() {
  python -m experiments.quickstart --seed="$1" --workdir="$2" &&
    python - "$2/summary.json" << 'END'
import json, sys

found = json.load(open(sys.argv[1]))
before, after = found['accuracy_sft'], found['accuracy_rl']
print(f'accuracy {before:.3f} -> {after:.3f}, {found["cpu_seconds"]:.0f} CPU-s')
assert 0.10 <= before <= 0.60 <= after and after - before >= 0.20
assert found['cpu_seconds'] < 480
END
}
