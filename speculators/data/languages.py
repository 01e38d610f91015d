"""Openings of questions in other languages than English, and topics from files.

A question that begins in a language is continued and, by most verifiers, answered in it. A drafter that will serve those
languages has to learn their tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from speculators.data.topics import TOPICS, Topic
from speculators.errors import ConfigError, DataError

_OPENINGS = {
    "ar": (
        "اشرح لي",
        "ما هو",
        "كيف يمكنني",
        "اكتب قصة قصيرة عن",
        "لماذا",
        "ما الفرق بين",
        "أعطني نصائح حول",
        "احسب",
    ),
    "de": (
        "Erkläre mir",
        "Was ist",
        "Wie kann ich",
        "Schreibe eine kurze Geschichte über",
        "Warum",
        "Was ist der Unterschied zwischen",
        "Gib mir Tipps für",
        "Berechne",
    ),
    "es": (
        "Explícame",
        "¿Qué es",
        "¿Cómo puedo",
        "Escribe una historia corta sobre",
        "¿Por qué",
        "¿Cuál es la diferencia entre",
        "Dame consejos para",
        "Calcula",
    ),
    "fr": (
        "Explique-moi",
        "Qu'est-ce que",
        "Comment puis-je",
        "Écris une courte histoire sur",
        "Pourquoi",
        "Quelle est la différence entre",
        "Donne-moi des conseils pour",
        "Calcule",
    ),
    "hi": (
        "मुझे समझाओ",
        "क्या है",
        "मैं कैसे",
        "एक छोटी कहानी लिखो",
        "क्यों",
        "दोनों में क्या अंतर है",
        "मुझे सुझाव दो",
        "गणना करो",
    ),
    "it": (
        "Spiegami",
        "Che cos'è",
        "Come posso",
        "Scrivi una breve storia su",
        "Perché",
        "Qual è la differenza tra",
        "Dammi dei consigli per",
        "Calcola",
    ),
    "ja": (
        "説明してください。",
        "教えてください。",
        "どうすれば",
        "短い物語を書いてください。",
        "なぜ",
        "違いは何ですか。",
        "助言をください。",
        "計算してください。",
    ),
    "ko": (
        "설명해 주세요.",
        "무엇인가요?",
        "어떻게 하면",
        "짧은 이야기를 써 주세요.",
        "왜",
        "차이점은 무엇인가요?",
        "조언해 주세요.",
        "계산해 주세요.",
    ),
    "pt": (
        "Explique",
        "O que é",
        "Como posso",
        "Escreva uma história curta sobre",
        "Por que",
        "Qual é a diferença entre",
        "Dê-me dicas para",
        "Calcule",
    ),
    "ru": (
        "Объясни мне",
        "Что такое",
        "Как я могу",
        "Напиши короткий рассказ про",
        "Почему",
        "Чем отличается",
        "Дай советы",
        "Вычисли",
    ),
    "zh": (
        "请解释",
        "什么是",
        "我怎样才能",
        "写一个短故事",
        "为什么",
        "有什么区别",
        "请给我一些建议",
        "计算",
    ),
}
LANGUAGES = tuple(sorted(_OPENINGS))


def with_languages(topics: Sequence[Topic], shares: dict[str, float]) -> list[Topic]:
    """Topics plus one a language, `language/<code>`.

    Args:
        topics: the others; their weights shrink so that all shares are of the whole.
        shares: code -> share of the questions.

    Raises:
        ConfigError: a code is unknown, or the shares leave nothing.
    """
    unknown = sorted(set(shares) - set(LANGUAGES))
    if unknown:
        raise ConfigError(f"there are no questions in {unknown[0]!r}; known are {', '.join(LANGUAGES)}; a topic file can bring its own")
    if any(not 0 < share <= 1 for share in shares.values()) or sum(shares.values()) > 1:
        raise ConfigError(f"the shares of languages {shares} must be positive and at most 1 together")
    rest, total = 1 - sum(shares.values()), sum(topic.weight for topic in topics)
    scaled = [replace(topic, weight=rest * topic.weight / total) for topic in topics] if rest > 1e-9 else []
    return scaled + [Topic(f"language/{code}", share, _OPENINGS[code]) for code, share in shares.items()]


def read_topics(path: str | Path) -> list[Topic]:
    """Topics from a JSONL file: `name`, `seeds` (beginnings of questions), and optionally `weight`, `suffixes`, `suffix_share`.

    Raises:
        DataError: the file is missing, or a line is none.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"there is no topic file {path}")
    topics = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            topics.append(_read_topic(line, f"{path}, line {number}"))
    if not topics:
        raise DataError(f"{path} holds no topics")
    return topics


def chosen_topics(paths: Sequence[str | Path], languages: Sequence[str]) -> Sequence[Topic]:
    """What `--topics` and `--language` ask for: files in place of the built-in topics, `code=share` beside them.

    Raises:
        ConfigError, DataError: see `with_languages` and `read_topics`.
    """
    topics: Sequence[Topic] = [topic for path in paths for topic in read_topics(path)] or TOPICS
    shares: dict[str, float] = {}
    for language in languages:
        code, equals, share = language.partition("=")
        try:
            shares[code] = float(share) if equals else 0.1
        except ValueError:
            raise ConfigError(f"--language {language!r} must be a code with a share, as in de=0.2") from None
    return with_languages(topics, shares) if shares else topics


def _read_topic(line: str, where: str) -> Topic:
    try:
        record: Any = json.loads(line)
        seeds, suffixes = record["seeds"], record.get("suffixes", [])
        if not seeds or not all(isinstance(text, str) for text in [record["name"], *seeds, *suffixes]):
            raise ValueError("seeds must be texts, at least one")
        topic = Topic(record["name"], float(record.get("weight", 1)), tuple(seeds), tuple(suffixes), float(record.get("suffix_share", 0)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f'{where}: {error}; a topic is a JSON object with "name" and "seeds"') from None
    if topic.weight <= 0 or not 0 <= topic.suffix_share <= 1 or (topic.suffix_share and not topic.suffixes):
        raise DataError(f"{where}: the weight must be positive, and a suffix_share in [0, 1] needs suffixes")
    return topic
