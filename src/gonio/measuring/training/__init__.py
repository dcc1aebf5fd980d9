"""The step of an optimizer as a rotation: its figures, the rotation that the optimizer's settings predict, advice."""
