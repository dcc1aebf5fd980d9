# Measures SOURCE; a finding at FAIL_ON or above ends with exit code 1. The figures and the page are the action's outputs.
set -uo pipefail
folder="${RUNNER_TEMP:-$(mktemp -d)}/gonio-check"
mkdir -p "$folder"
more=()
while IFS= read -r argument; do
    [ -z "$argument" ] || more+=("$argument")
done <<< "${ARGUMENTS:-}"
code=0
python -m gonio measure "$SOURCE" "${more[@]+"${more[@]}"}" --fail-on "$FAIL_ON" \
    --json "$folder/figures.json" --html "$folder/page.html" 2>&1 | tee "$folder/table.txt" || code=$?
{
    echo '```text'
    cat "$folder/table.txt"
    echo '```'
} >> "${GITHUB_STEP_SUMMARY:-/dev/null}"
{
    echo "json=$folder/figures.json"
    echo "html=$folder/page.html"
} >> "${GITHUB_OUTPUT:-/dev/null}"
exit "$code"
