"""The reward of the example: is a number even (e) or odd (o)?"""


def score(text, answer):
    """1 for the right letter alone; half of it where more follows."""
    said = text.strip()
    right = said == answer
    return {"reward": 1.0 if right else 0.5 * said.startswith(answer), "right": right, "said": said}
