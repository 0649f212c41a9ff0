"""What turns the five chapters into programs. One module, one job:

    loading             finds, checks and loads targets and drafters, and saves drafters
    packed, exact       make passes over a few tokens fast and, on a CPU, bit-identical
    vocabulary          a drafter that drafts frequent tokens only
    lookup              drafts that copy earlier text
    answers             ways to answer a prompt, and what an answer cost
    display, chat       an answer in colors or cycle by cycle; one prompt, or a chat
    client, server      netsim's client and server over real sockets, and a lost server
    training            training as a program: logs, checkpoints, several processes
    evaluation          how good a drafter is on held-out text
    *_command           the command lines of llama.py, speculate.py and train.py

The chapters know nothing of these modules, which wrap, subclass or call them. (Only the last lines
of three hand over to their command lines.) A reader of the paper may skip the whole folder. To see
how a command reaches the loop, read `answer` and `load_method` of speculate_command,
`Terminal.respond` of chat, `WithDrafts.cycles` and `timed_cycles` of answers. packed is what makes
speculation pay on a CPU; exact is what makes greedy text identical.
"""
