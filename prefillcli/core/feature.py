def features():
    return ()
