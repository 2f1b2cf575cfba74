"""What the command line does, for programs: each module returns data and prints nothing."""
