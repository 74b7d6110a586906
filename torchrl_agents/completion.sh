# Completion of torchrl-agents: bash, and zsh by what it has of bash's.
if [ -n "${ZSH_VERSION-}" ]; then
    autoload -U +X compinit && compinit
    autoload -U +X bashcompinit && bashcompinit
fi

_torchrl_agents() {
    # What is typed ends at the cursor; the shell replaces $2, the part of the last word after = or :.
    local IFS=$'\n' typed=${COMP_LINE:0:$COMP_POINT} word kept
    word=${typed##* }
    kept=${word%"$2"}
    COMPREPLY=($("${1/#\~/$HOME}" completion words "$typed" 2> /dev/null < /dev/null))
    COMPREPLY=("${COMPREPLY[@]#"$kept"}")
}

# Where nothing of ours fits, names of files do.
complete -o default -o nospace -F _torchrl_agents torchrl-agents
