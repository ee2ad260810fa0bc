"""Training that can be stopped and gone on with, on the same ranks or others.

file           what it does
-------------  ------------------------------------------------------------------------------------------
`checkpoints`  saves tensors of all ranks beside the training, whole or not at all, and loads the last whole one
`folder`       the folder of all checkpoints: how one becomes whole, which are removed, who may save
`files`        the bytes of tensors in files
`manifest`     what makes a checkpoint whole: its files with their sizes, written last, under its final name
`rounds`       what ranks exchange through the store
`together`     what ranks find in the folder, and say of it to each other
`pieces`       tensors of which a rank has several boxes, such as fused queries, keys and values
`state`        modules, optimizer and random states of a rank as tensors with names that no mesh changes
"""
