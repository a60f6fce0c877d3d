"""What is kept on disk and what is read from there: the cache's folder, whole files, text that is harmless.

In: names of folders, bytes to keep, text of files.
Out: folders that are the user's own, files written whole or not at all, text that no terminal obeys.
Imports: nothing.
"""
