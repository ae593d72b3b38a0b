def forest(name, question, found):
    pass
