from weft.compat.axlearn.utils import *
