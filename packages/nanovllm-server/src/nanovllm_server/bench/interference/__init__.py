"""The command `interference`: how long prompts, short requests, decoding streams and chat turns delay each other.

`interference_command` runs the cases and reports them, `case_runner` says what each case does.
"""
