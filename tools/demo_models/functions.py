"""The small Python functions the assistant can write."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FunctionSpec:
    """A function's default name, the ways people ask for it, and its code."""

    name: str
    wishes: tuple[str, ...]
    code: str


def _function(name: str, wishes: str, parameters: str, result: str) -> FunctionSpec:
    return FunctionSpec(name, tuple(wishes.split("|")), f"def NAME({parameters}):\n    return {result}")


def _body(name: str, wishes: str, parameters: str, *lines: str) -> FunctionSpec:
    body = "\n".join("    " + line for line in lines)
    return FunctionSpec(name, tuple(wishes.split("|")), f"def NAME({parameters}):\n{body}")


FUNCTIONS: tuple[FunctionSpec, ...] = (
    _function("add", "adds two numbers|returns the sum of two numbers|takes a and b and adds them", "a, b", "a + b"),
    _function("subtract", "subtracts two numbers|subtracts b from a", "a, b", "a - b"),
    _function("multiply", "multiplies two numbers|returns the product of two numbers", "a, b", "a * b"),
    _function("divide", "divides two numbers|divides a by b", "a, b", "a / b"),
    _function("square", "squares a number|returns the square of a number|computes the square of x", "x", "x * x"),
    _function("cube", "cubes a number|returns the cube of a number", "x", "x ** 3"),
    _function("double", "doubles a number|returns twice a number", "x", "x * 2"),
    _function("half", "halves a number|returns half of a number", "x", "x / 2"),
    _function("negate", "negates a number|flips the sign of a number", "x", "-x"),
    _function("times_{n}", "multiplies a number by {n}|multiplies x by {n}", "x", "x * CONSTANT"),
    _function("add_{n}", "adds {n} to a number|adds {n} to x", "x", "x + CONSTANT"),
    _function("subtract_{n}", "subtracts {n} from a number|takes {n} away from a number", "x", "x - CONSTANT"),
    _function(
        "divisible_by_{n}",
        "checks if a number is divisible by {n}|tests whether x is divisible by {n}",
        "x",
        "x % CONSTANT == 0",
    ),
    _function(
        "above_{n}", "checks if a number is above {n}|tells if a number is greater than {n}", "x", "x > CONSTANT"
    ),
    _function(
        "is_even", "checks if a number is even|tells whether a number is even|tests for even numbers", "n", "n % 2 == 0"
    ),
    _function(
        "is_odd", "checks if a number is odd|tells whether a number is odd|tests for odd numbers", "n", "n % 2 == 1"
    ),
    _function(
        "maximum", "returns the larger of two numbers|finds the maximum of two numbers", "a, b", "a if a > b else b"
    ),
    _function(
        "minimum", "returns the smaller of two numbers|finds the minimum of two numbers", "a, b", "a if a < b else b"
    ),
    _function(
        "average",
        "returns the average of a list|computes the mean of a list|averages a list",
        "values",
        "sum(values) / len(values)",
    ),
    _function("total", "sums a list|adds up a list of numbers|returns the sum of a list", "values", "sum(values)"),
    _function("largest", "finds the largest number in a list|returns the maximum of a list", "values", "max(values)"),
    _function("smallest", "finds the smallest number in a list|returns the minimum of a list", "values", "min(values)"),
    _function("reverse", "reverses a string|returns a string backwards", "text", "text[::-1]"),
    _function(
        "is_palindrome", "checks if a string is a palindrome|tests for palindromes", "text", "text == text[::-1]"
    ),
    _function("upper", "makes a string upper case|converts a string to upper case", "text", "text.upper()"),
    _function("lower", "makes a string lower case|converts a string to lower case", "text", "text.lower()"),
    _function("length", "returns the length of a string|counts the characters of a string", "text", "len(text)"),
    _function(
        "count_words",
        "counts the words in a text|counts words|counts the words in a string",
        "text",
        "len(text.split())",
    ),
    _function(
        "count_vowels",
        "counts the vowels in a string|counts vowels",
        "text",
        'sum(letter in "aeiou" for letter in text)',
    ),
    _function("first", "returns the first item of a list|gets the first element of a list", "values", "values[0]"),
    _function("last", "returns the last item of a list|gets the last element of a list", "values", "values[-1]"),
    _function("sort_list", "sorts a list|returns a sorted list", "values", "sorted(values)"),
    _function(
        "unique",
        "removes duplicates from a list|returns the unique items of a list",
        "values",
        "list(dict.fromkeys(values))",
    ),
    _function(
        "evens",
        "returns the even numbers of a list|keeps only even numbers|filters even numbers",
        "values",
        "[n for n in values if n % 2 == 0]",
    ),
    _function(
        "squares", "squares every number in a list|returns the squares of a list", "values", "[n * n for n in values]"
    ),
    _function("join_words", "joins words with spaces|joins a list of words", "words", '" ".join(words)'),
    _function(
        "circle_area", "computes the area of a circle|returns the area of a circle", "radius", "3.14159 * radius ** 2"
    ),
    _function(
        "rectangle_area",
        "computes the area of a rectangle|returns the area of a rectangle",
        "width, height",
        "width * height",
    ),
    _function("to_fahrenheit", "converts celsius to fahrenheit", "celsius", "celsius * 9 / 5 + 32"),
    _function("to_celsius", "converts fahrenheit to celsius", "fahrenheit", "(fahrenheit - 32) * 5 / 9"),
    _function("greet", "greets a person by name|says hello to a name|returns a greeting", "name", 'f"Hello, {name}!"'),
    _body(
        "factorial",
        "computes the factorial of a number|computes a factorial|returns n factorial",
        "n",
        "result = 1",
        "for i in range(2, n + 1):",
        "    result *= i",
        "return result",
    ),
    _body(
        "fibonacci",
        "returns the nth fibonacci number|computes fibonacci numbers|computes fibonacci",
        "n",
        "a, b = 0, 1",
        "for _ in range(n):",
        "    a, b = b, a + b",
        "return a",
    ),
    _body(
        "is_prime",
        "checks if a number is prime|tests for prime numbers|tells whether n is prime",
        "n",
        "if n < 2:",
        "    return False",
        "for i in range(2, int(n ** 0.5) + 1):",
        "    if n % i == 0:",
        "        return False",
        "return True",
    ),
    _body(
        "gcd",
        "computes the greatest common divisor|finds the gcd of two numbers",
        "a, b",
        "while b:",
        "    a, b = b, a % b",
        "return a",
    ),
    _body(
        "count_to_{n}",
        "prints the numbers from 1 to {n}|counts to {n}",
        "",
        "for i in range(1, CONSTANT + 1):",
        "    print(i)",
    ),
    _body(
        "count_letters",
        "counts each letter in a string|counts the letters of a text",
        "text",
        "counts = {}",
        "for letter in text:",
        "    counts[letter] = counts.get(letter, 0) + 1",
        "return counts",
    ),
    _body(
        "read_lines",
        "reads the lines of a file|reads a file into a list of lines",
        "path",
        "with open(path) as file:",
        "    return file.read().splitlines()",
    ),
    _body(
        "fizzbuzz",
        "plays fizzbuzz|prints fizzbuzz up to n",
        "n",
        "for i in range(1, n + 1):",
        "    if i % 15 == 0:",
        '        print("FizzBuzz")',
        "    elif i % 3 == 0:",
        '        print("Fizz")',
        "    elif i % 5 == 0:",
        '        print("Buzz")',
        "    else:",
        "        print(i)",
    ),
)
