"""What no paper is about. These modules import nothing of the chapters or of app:

    errors, flags, devices      errors of one line; command lines; where and in which dtype to run
    hub, huggingface, gguf      where checkpoints are, and how two formats are read
    tokenizer, chat             text to tokens and back; chat templates
    records, conversations      training data: JSON records, and the conversations in them
    files, journal, signals     atomic writes; the log and checkpoint of a training; Ctrl-C
    processes                   several processes that train together
    messages                    messages over a socket, and a server of many clients
    prompts, terminal           prompts that fit the context; what a person sees and types
    onednn, kernels, layout     products in oneDNN's format; how much padding makes passes
                                bit-identical; slots for the nodes of a tree

A reader of the paper may skip all of them. The last line has a story of its own: why the same sum
can have two values, and what that means for speculative decoding.
"""
