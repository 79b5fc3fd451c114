#!/usr/bin/env bash
# What a script of jobs/ or tools/ begins with, . tools/help.sh: asked for --help or -h, it prints its header and does nothing else.
#
# Sourced, this sees the script's own words. SLURM runs a copy of a job's file: the header is that of the copy, and this file is
# found in the folder that the job was submitted from.
set -euo pipefail
case " $* " in
    *" -h "* | *" --help "*)
        sed -n '2,/^set/{/^#SBATCH/d;/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[1]:-${BASH_SOURCE[0]}}"
        exit 0
        ;;
esac
