"""fashion_oct: train Keras models on many devices, and trust the numbers."""

__version__ = "0.1.0"
