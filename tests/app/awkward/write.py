"""Write the awkward tables beside this file: `python -m tests.app.awkward.write`. All but a few hold the same rows."""

import csv
import io
import random
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
NAMES = ["day", "amount", "share", "count", "shop", "y"]
Row = dict[str, Any]
MONTHS = {12: "Dezember", 1: "Januar"}


def rows() -> list[Row]:
    """Forty rows: a date, a sum that may be negative, a percentage, a whole number, a shop, a positive target."""
    rng = random.Random(0)
    out = []
    for i in range(40):
        out.append(
            {
                "day": datetime(2023, 12, 20) + timedelta(days=i, hours=(7 * i) % 24, minutes=30),
                "amount": round(rng.uniform(-900, 4000), 2),
                "share": round(rng.uniform(0, 100), 1),
                "count": rng.randrange(2, 4000),
                "shop": rng.choice(["Süd", "Nord", "West"]),
                "y": round(rng.uniform(1, 3000), 2),
            }
        )
    out[0]["amount"], out[1]["amount"], out[0]["y"] = 1234.56, -12.5, 1021.75
    return out


def grouped(value: float, thousands: str, decimal: str, digits: int = 2) -> str:
    """A number as people write it."""
    text = f"{value:,.{digits}f}"
    return text.replace(",", "\0").replace(".", decimal).replace("\0", thousands)


def table(
    delimiter: str = ",",
    quoting: int = csv.QUOTE_MINIMAL,
    end: str = "\n",
    names: list[str] = NAMES,
    day: Callable[[datetime], str] = lambda d: d.strftime("%Y-%m-%d %H:%M"),
    money: Callable[[float], str] = str,
    share: Callable[[float], str] = str,
    whole: Callable[[int], str] = str,
    shop: Callable[[str], str] = str,
    target: Callable[[float], str] | None = None,
) -> str:
    """The rows as CSV, each kind of value written by its own function."""
    target = target or money
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter, quoting=quoting, lineterminator=end)
    writer.writerow(names)
    for row in rows():
        made = day(row["day"]), money(row["amount"]), share(row["share"]), whole(row["count"]), shop(row["shop"])
        writer.writerow([*made, target(row["y"])])
    return out.getvalue()


def german(value: float) -> str:
    return grouped(value, ".", ",")


def comma(value: float) -> str:
    return str(value).replace(".", ",")


def dotted(day: datetime) -> str:
    return day.strftime("%d.%m.%Y %H:%M")


def every_seventh(word: str, write: Callable[[Any], str] = str) -> Callable[[Any], str]:
    """Values with a word for nothing in every seventh place."""
    place = iter(range(10_000))
    return lambda value: word if next(place) % 7 == 3 else write(value)


def tables() -> dict[str, bytes]:
    """The files by name."""
    us_day = lambda d: d.strftime("%m/%d/%Y %H:%M")  # noqa: E731
    dollars = lambda v: f"(${-v:,.2f})" if v < 0 else f"${v:,.2f}"  # noqa: E731
    text = {
        "plain": table(),
        "german": table(";", day=dotted, money=german, share=comma),
        "german_bom": "\ufeff" + table(";", day=dotted, money=german, share=comma),
        "german_whole": table(";", day=dotted, money=german, share=comma, whole=lambda v: grouped(v, ".", ",", 0)),
        "german_names": table(";", day=lambda d: f"{d.day}. {MONTHS[d.month]} {d:%Y %H:%M}", money=german, share=comma),
        "french": table(
            ";", day=lambda d: d.strftime("%d/%m/%Y %H:%M"), money=lambda v: grouped(v, "\u00a0", ","), share=comma
        ),
        "french_narrow": table(";", day=dotted, money=lambda v: grouped(v, "\u202f", ","), share=comma),
        "french_euro": table(";", day=dotted, money=lambda v: grouped(v, " ", ",") + " €", share=comma),
        "us": table(day=us_day, money=lambda v: grouped(v, ",", "."), quoting=csv.QUOTE_ALL),
        "us_money": table(day=us_day, money=dollars),
        "us_am_pm": table(day=lambda d: d.strftime("%m/%d/%Y %I:%M %p"), money=dollars),
        "us_names": table(day=lambda d: d.strftime("%b %d, %Y %H:%M")),
        "british_names": table(
            day=lambda d: d.strftime("%d-%b-%Y %H:%M"), money=lambda v: f"£{v:,.2f}".replace("£-", "-£")
        ),
        "euro_before": table(";", day=dotted, money=lambda v: f"€{comma(v)}".replace("€-", "-€"), share=comma),
        "percent": table(share=lambda v: f"{v}%"),
        "percent_comma": table("\t", day=dotted, money=german, share=lambda v: comma(v) + " %"),
        "swiss": table(money=lambda v: grouped(v, "'", "."), day=dotted),
        "sap_minus": table(";", money=lambda v: german(abs(v)) + ("-" if v < 0 else ""), share=comma, day=dotted),
        "scientific": table(";", money=lambda v: f"{v:.7E}".replace(".", ","), share=comma, day=dotted),
        "unicode_minus": table(money=lambda v: str(v).replace("-", "−")),
        "short_years": table(";", day=lambda d: d.strftime("%d.%m.%y %H:%M"), money=german, share=comma),
        "slashes": table(day=lambda d: d.strftime("%Y/%m/%d %H:%M")),
        "separator_line": "sep=;\n" + table(";", day=dotted, money=german, share=comma),
        "windows_lines": table(end="\r\n").replace("\r\n", "\r\n\r\n", 3),
        "tabs": table("\t"),
        "bars": table("|", day=dotted, money=german, share=comma),
        "padded": table(share=lambda v: f"  {v} ", shop=lambda s: f" {s}  "),
        "quoted": table(quoting=csv.QUOTE_ALL, shop=lambda s: s),
        "errors": table(share=every_seventh("#DIV/0!"), whole=every_seventh("#N/A")),
        "question_marks": table(share=every_seventh("?"), whole=every_seventh("-")),
        "nines": table(share=every_seventh("-999"), whole=every_seventh("unknown")),
        "cases": table(shop=(lambda i: lambda s: (s, s.upper(), f" {s.lower()}")[next(i) % 3])(iter(range(99)))),
    }
    text.update(others())
    out = {name: content.encode() for name, content in text.items()}
    latin = table(
        ";", names=["Tag", "Umsatz", "Anteil", "Stück", "Geschäft", "y"], day=dotted, money=german, share=comma
    )
    out["latin1"] = latin.encode("cp1252")
    out["latin1_late"] = table(";", day=dotted, money=german, share=comma).encode("cp1252")
    out["utf16_tabs"] = ("\ufeff" + table("\t", end="\r\n")).encode("utf-16-le")  # a spreadsheet's "Unicode text"
    out["utf16_big_endian"] = ("\ufeff" + table(";", day=dotted, money=german, share=comma)).encode("utf-16-be")
    return out


def others() -> dict[str, str]:
    """Tables of their own."""
    lines = range(60)
    yes = ["Yes", "yes", "Y", "YES", " yes"]
    no = ["No", "no", "N", "n", "NO "]
    return {
        "yes_no": "member,x,y\n" + "".join(f"{(yes if i % 3 else no)[i % 5]},{i * 7 % 11},{i}.5\n" for i in lines),
        "big_integers": "x,y\n" + "".join(f"{i * 7 % 11}.5,{2**53 + i % 3}\n" for i in lines),
        "leading_zeros": "x,y\n" + "".join(f"{i * 7 % 11}.5,{i % 3:03d}\n" for i in lines),
        "long_ids": "id,x,y\n" + "".join(f"{10**20 + 7 * i * i},{i * 7 % 11},{i}.5\n" for i in lines),
        "mixed": "x,y\n" + "".join(f"{'oops' if i == 7 else i * 7 % 13 * 1.5},{i}.25\n" for i in lines),
        "quoted_lines": "note,x,y\n" + "".join(f'"a ""{i % 3}"",\nb",{i * 7 % 11},{i}.5\n' for i in lines),
        "late_class": "x,y\n"
        + "".join(f"{i * 7 % 11}.5,{'late' if i > 40 and i % 3 else 'ab'[i % 2]}\n" for i in lines),
        "plus_minus": "x,sign,y\n" + "".join(f"{i * 7 % 11},{'+-'[i % 2]},{i}.5\n" for i in lines),
    }


if __name__ == "__main__":
    for name, content in tables().items():
        (FOLDER / f"{name}.csv").write_bytes(content)
