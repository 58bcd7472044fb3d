from weft.generation.generator import (
    generate as generate, Generator as Generator, LanguageModel as LanguageModel,
)
from weft.generation.text import Completion as Completion, StreamedText as StreamedText
