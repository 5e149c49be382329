"""``selftask completion``: print a script for shell completion of selftask's commands."""

from __future__ import annotations

import sys

from selftask.cli.options import take_options
from selftask.errors import UserError, check_known

USAGE = """\
usage: selftask completion bash|zsh|fish

Prints a script for the shell, which completes commands, recipes, methods, runs, options, and
key=value: the keys of `optimizer.`, the names of `optimizer=`.
  bash:  eval "$(selftask completion bash)"    in ~/.bashrc
  zsh:   eval "$(selftask completion zsh)"     in ~/.zshrc, after compinit
  fish:  selftask completion fish > ~/.config/fish/completions/selftask.fish"""

# bash splits words at = and :, so its candidates lack the part before the last of these.
_BASH = r"""_selftask() {
    local line="${COMP_LINE:0:COMP_POINT}" IFS=$'\n' word before
    word="${line##*[[:space:]]}"
    before="${word%"${word##*[=:]}"}"
    COMPREPLY=()
    while read -r candidate; do
        COMPREPLY+=("${candidate#"$before"}")
    done < <("$1" completion --line "$line" 2>/dev/null)
    if [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" != *[=./:] ]]; then
        COMPREPLY[0]+=" "
    fi
}
complete -o nospace -o nosort -F _selftask selftask"""

_ZSH = r"""_selftask() {
    local -a open closed
    local candidate
    for candidate in ${(f)"$(${words[1]} completion --line "$LBUFFER" 2>/dev/null)"}; do
        if [[ $candidate == *[=./:] ]]; then open+=("$candidate"); else closed+=("$candidate"); fi
    done
    compadd -Q -S '' -a open
    compadd -Q -a closed
}
compdef _selftask selftask"""

_FISH = r"""function __selftask_candidates
    selftask completion --line (commandline -cp | string collect) 2>/dev/null
end
complete -c selftask -f -a '(__selftask_candidates)'"""

SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def main(argv: list[str]) -> int:
    """Print the script for a shell, or the completions of ``--line TEXT`` for such a script."""
    words, options = take_options(argv, {"--line": str})
    if "--line" in options:
        from selftask.cli.shell.candidates import candidates

        print("\n".join(candidates(options["--line"])))
        return 0
    if len(words) != 1:
        raise UserError(f"completion needs the name of a shell\n{USAGE}")
    check_known(words[0], SCRIPTS, f"there is no completion for {words[0]!r}")
    sys.stdout.write(f"{SCRIPTS[words[0]]}\n")
    return 0
