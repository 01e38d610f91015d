"""Topic seeds: how self-synthesised questions begin, so that they cover mathematics, code and conversation.

A chat model that continues an opened user turn writes a user's question (MAGPIE, Xu et al. 2024). Left alone, a small
one keeps asking about the same few things; a few forced words choose the topic and leave the question to the model.
In a seed, `{name}` stands for a first name and `{number}` for a small number, drawn anew each time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Topic:
    """One kind of question.

    Attributes:
        name: as counted in reports.
        weight: share of the questions, relative to the other topics'.
        seeds: forced beginnings of the user turn, equally likely.
        suffixes: one of them may follow the question.
        suffix_share: how often one does.
        wrappers: for functions to complete: what stands before the code. A topic with wrappers asks for code, its
            seeds begin the function's code, and the model writes the signature and the docstring.
    """

    name: str
    weight: float
    seeds: tuple[str, ...]
    suffixes: tuple[str, ...] = ()
    suffix_share: float = 0.0
    wrappers: tuple[str, ...] = ()


# Kept as text: seventy lines of one word each would hide the seeds.
NAMES = re.findall(
    r"\w+",
    "Aisha Alejandro Amara Ana Andre Anika Ben Bianca Boris Carmen Chen Chloe Dmitri Elena Emeka Emma Farid Fatima Felix Freya Gita Hana"
    " Hassan Hugo Ines Isaac Ivy Jamal Jan Jin Jonas Kai Katya Kofi Lars Leila Liam Lucia Malik Mara Marco Mei Mina Mohamed Nadia Nia"
    " Noah Olga Omar Oscar Paula Pedro Priya Quinn Rafael Ravi Rosa Ruth Sam Sana Sofia Stefan Tariq Tessa Theo Uma Victor Wei Yara"
    " Yusuf Zoe",
)
_FUNCTION_BEGINNINGS = re.findall(
    r"\w+",
    "count_ is_ find_ remove_ get_ check_ sum_ max_ min_ sort_ reverse_ convert_ calculate_ filter_ largest_ common_ next_ split_ merge_"
    " has_ longest_ even_ digits_ encode_ decode_ rotate_ smallest_ unique_ words_ is_valid_ string_ list_ number_of_ make_ replace_ swap_"
    " add_ compare_ select_ solve",
)

_BOXED = (
    "\nThink step by step and put the final answer in \\boxed{}.",
    "\nShow your reasoning and give the final answer within \\boxed{}.",
    "\nReason step by step, then put your final answer within \\boxed{}.",
    "\nSolve this step by step. Put your final answer in \\boxed{}.",
    "\nExplain each step and write the answer inside \\boxed{}.",
    "\nPlease work through it step by step, and put the result within \\boxed{}.",
    "\nPlease think carefully, one step at a time, and box the final answer as \\boxed{}.",
    "\nLet's think step by step.",
    "\nPlease explain your steps.",
    " Show your work.",
)

_WORD_PROBLEMS = Topic(
    "word problems",
    0.23,
    (
        "{name} has",
        "{name} buys",
        "{name} bought {number}",
        "{name} bakes",
        "{name} earns $",
        "{name} is saving money",
        "{name} is {number} years old",
        "{name} and {name} are",
        "{name} reads {number}",
        "{name} runs {number}",
        "{name} drove {number}",
        "{name} collected {number}",
        "{name} planted",
        "{name} wants to buy",
        "{name} works {number} hours",
        "{name} spends {number}",
        "{name} sells {number}",
        "{name} makes {number}",
        "{name}'s garden has",
        "{name}'s class",
        "Every day, {name} eats",
        "Last week, {name}",
        "On Monday, {name} sold",
        "A farmer has",
        "A bakery sells {number}",
        "A store sells",
        "A school has",
        "A train travels",
        "A car travels at",
        "A bus starts with {number}",
        "A box contains {number}",
        "A recipe calls for",
        "A water tank holds",
        "A company has {number}",
        "A gym charges",
        "A movie ticket costs $",
        "A pizza is cut into",
        "A rope is {number} meters long",
        "At a school fair, {number}",
        "In a class of {number}",
        "In a basket, there are {number}",
        "There are {number}",
        "Three friends share",
        "If a shirt costs $",
        "If it takes {number} workers",
        "How much money does {name}",
        "How many apples does {name}",
    ),
    _BOXED,
    0.75,
)

_COMPETITION_MATH = Topic(
    "competition mathematics",
    0.22,
    (
        "Find the value of $x$",
        "Find the value of $\\",
        "Find the value of $a +",
        "Find the sum of",
        "Find the smallest positive integer",
        "Find the largest integer",
        "Find the number of",
        "Find all real",
        "Find the equation of the line",
        "Find the derivative of $f(x)",
        "Find the area of",
        "Find the distance between",
        "Let $f(x) =",
        "Let $a$ and $b$ be",
        "Let $S$ be",
        "Let $z$ be a complex number",
        "Let $p$ be a prime",
        "Let $\\mathbf{v}",
        "If $x",
        "If $f(x)",
        "If $\\log",
        "If $a",
        "Given that $x",
        "Given that $\\sin",
        "Suppose that $x",
        "Suppose that $f",
        "Solve for $x$:",
        "Solve for $x$: $",
        "Solve the equation $x",
        "Solve the inequality $",
        "Solve the system of equations",
        "Simplify $\\",
        "Simplify the expression $",
        "Evaluate the expression $",
        "Evaluate $\\",
        "Evaluate $|",
        "Evaluate the integral $\\int",
        "Evaluate $\\frac",
        "Compute $\\",
        "Compute $\\sin",
        "Compute the determinant",
        "Compute $(",
        "Calculate the",
        "Factor $x",
        "Factor the polynomial",
        "Expand $(",
        "Express $\\",
        "Express the number",
        "Convert the point",
        "Convert {number}",
        "Determine the number of",
        "Determine the value of $",
        "The polynomial $",
        "The function $f(x)",
        "The sequence $a_1",
        "The sum of two numbers is",
        "The product of two",
        "The graph of $y",
        "The points $A",
        "The length of a rectangle",
        "The ratio of",
        "The average of {number}",
        "In triangle $ABC$,",
        "In a right triangle, the",
        "In how many ways can",
        "A circle has radius",
        "A rectangle has",
        "A cube has",
        "A fair coin is",
        "A bag contains {number}",
        "A regular hexagon",
        "Two fair dice",
        "What is the remainder when ${number}",
        "What is the value of $x$",
        "What is the value of $\\sqrt",
        "What is the value of $2^",
        "What is the greatest common divisor of {number}",
        "What is the least common multiple of",
        "What is the probability that",
        "What is the units digit of",
        "What is the sum of the first {number}",
        "What is the slope of",
        "What is the area of",
        "What is the domain of",
        "How many positive integers",
        "How many integers",
        "How many ways",
        "How many three-digit",
        "For what value of $",
        "For how many values of",
    ),
    _BOXED,
    0.75,
)

_CODE = Topic(
    "code",
    0.11,
    (
        "Write a Python function that",
        "Write a Python function to",
        "Write a Python program to",
        "Write a Python script that",
        "Write a Python class",
        "Write a function that takes a list",
        "Write a function that takes a string",
        "Write a recursive function",
        "Write a function in JavaScript",
        "Write a C++ function",
        "Write a Java method",
        "Write a SQL query",
        "Write a bash script",
        "Write a simple HTML page",
        "Write a regular expression",
        "Write a unit test for",
        "Implement a function",
        "Implement a class",
        "Implement an algorithm",
        "Implement the",
        "Create a Python function",
        "Create a Python dictionary",
        "Given a list of integers,",
        "Given a string,",
        "Given an array of",
        "Given two sorted",
        "Given a dictionary",
        "You are given a list of",
        "How do I sort",
        "How can I use Python to",
        "How do I read a file",
        "Fix the bug in this code:\n```python\ndef",
        "What does this code do?\n```python\ndef",
        "Explain the following Python code:\n```python\nfor",
        "What is the time complexity of",
        "What is the difference between a list and",
        "Using only the standard library,",
        "Use a loop to",
        "Define a function",
        "Design a class",
    ),
)

_FUNCTIONS = Topic(
    "functions to complete",
    0.15,
    (
        *(f"def {beginning}" for beginning in _FUNCTION_BEGINNINGS),
        "def",
        "def",
        "def",
        "def",
        "import math\n\n\ndef",
        "from typing import List\n\n\ndef",
        "from typing import List\n\n\ndef",
        "from typing import List, Tuple\n\n\ndef",
        "from typing import Dict, Optional\n\n\ndef",
    ),
    wrappers=(
        "Complete this Python function:\n```python\n",
        "Finish the code below so that it does what the docstring says.\n```python\n",
        "Here is a function with its docstring. Write the body:\n```python\n",
        "Implement the following function in Python.\n\n```python\n",
        "Please solve this programming task and check it against the examples:\n```python\n",
        "Write the function described below, it has to pass its tests:\n```python\n\n",
        "Write a correct solution for this problem and make it pass the hidden tests:\n```python\n",
        "",
    ),
)

_WRITING = Topic(
    "writing",
    0.08,
    (
        "Write a short story about",
        "Write a poem about",
        "Write a blog post about",
        "Write a letter to",
        "Write a product description for",
        "Write a persuasive",
        "Write a review of",
        "Write a speech",
        "Write a dialogue between",
        "Write a paragraph",
        "Write an essay",
        "Write an email",
        "Draft an email",
        "Draft a",
        "Compose a",
        "Rewrite the following",
        "Rewrite this sentence",
        "Summarize the following",
        "Edit the following paragraph",
        "Describe a",
        "Create a list of",
        "Come up with",
        "Suggest",
        "Outline",
        "Give me five",
        "Give an example of",
    ),
)

_ROLEPLAY = Topic(
    "role play",
    0.03,
    (
        "Imagine you are",
        "Pretend to be",
        "Pretend that you are",
        "You are a",
        "Act as",
        "Take on the role of",
        "As a doctor,",
        "As a teacher,",
        "If you were",
        "Answer as",
        "Speak like",
    ),
)

_REASONING = Topic(
    "reasoning",
    0.04,
    (
        "Which is",
        "Which of the following",
        "If all",
        "If you",
        "Why",
        "What would happen if",
        "Compare",
        "Suppose",
        "A man",
        "Three people",
        "What comes next in",
        "Solve this riddle:",
        "Is it possible",
        "Which word does not",
        "True or false:",
        "You are in a race",
        "There is a",
    ),
)

_KNOWLEDGE = Topic(
    "knowledge",
    0.07,
    (
        "Explain",
        "Explain the concept of",
        "Explain to a child",
        "What is",
        "What is the significance of",
        "What are the main causes of",
        "What are the differences between",
        "What are the advantages",
        "What are some",
        "How does",
        "How do",
        "How did",
        "Why does",
        "Who was",
        "When did",
        "Describe the process",
        "Discuss the",
        "Provide an overview of",
        "Tell me about",
        "In physics,",
        "In economics,",
        "In biology,",
        "In chemistry,",
        "In history,",
        "In computer science,",
    ),
)

_EXTRACTION = Topic(
    "extraction",
    0.03,
    (
        "Extract",
        "Extract the following information",
        "Classify the following",
        "Identify the",
        "List the",
        "From the text below,",
        "Read the following passage",
        "Read the following text",
        "Based on the following",
        "Translate",
        "Sort the following",
        "Count the number of",
        "Analyze the following",
        "Given the following data",
        "Here is a paragraph",
        "Convert the following",
    ),
)

_EVERYDAY = Topic(
    "everyday",
    0.04,
    (
        "",
        "",
        "",
        "Can you",
        "Could you",
        "I need",
        "I am",
        "I want to",
        "Help me",
        "How to",
        "How can I",
        "My",
        "Recommend",
        "Plan a",
        "What should I",
        "Please",
    ),
)

TOPICS = (
    _WORD_PROBLEMS,
    _COMPETITION_MATH,
    _CODE,
    _FUNCTIONS,
    _WRITING,
    _ROLEPLAY,
    _REASONING,
    _KNOWLEDGE,
    _EXTRACTION,
    _EVERYDAY,
)
