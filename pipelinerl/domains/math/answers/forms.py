"""The meaning of characters, commands and words in an answer. Only data: a new form is a line here."""

import re

from pipelinerl.domains.math.answers.trees import REAL_LINE, FiniteSet, Sym, Tree


def table(text: str) -> frozenset[str]:
    return frozenset(text.split())


# --- characters

UNICODE = str.maketrans(
    {
        "−": "-", "–": "-", "×": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ", "÷": "/", "≤": r"\le ", "≥": r"\ge ",
        "≠": r"\ne ", "∞": r"\infty ", "π": r"\pi ", "√": r"\sqrt ",
        "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}",
        "≈": r"\approx ", "μ": r"\mu ", "µ": r"\mu ", "Ω": r"\Omega ", "θ": r"\theta ", "α": r"\alpha ",
        "€": r"\euro ", "£": r"\pounds ", "₹": r"\rupee ", "¥": r"\yen ", "¢": r"\cents ", "…": r"\ldots ",
        "⁄": "/", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]", "\u00a0": " ", "\u2009": " ", "\u202f": " ",
    }
)  # fmt: skip
SCRIPTS = {"^": "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "_": "₀₁₂₃₄₅₆₇₈₉"}
"""The characters that stand for ``0`` to ``9``, ``+`` and ``-`` as a power or an index."""
VULGAR = "¼½¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞⅐⅑⅒"
OPENING = ("(", "[", "{", "\\{")
CLOSING = (")", "]", "}", "\\}")

# --- commands

FUNCTIONS = table("ln log lg exp sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh")
PLAIN_WORDS = {"sqrt", "pi", "infty", *FUNCTIONS}
"""Commands that are understood without their backslash."""
OTHER_NAMES = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac"), "frac"), **dict.fromkeys(("dbinom", "tbinom"), "binom"),
    "tg": "tan", "ctg": "cot", "cotg": "cot", "arctg": "arctan", "cosec": "csc", "sh": "sinh", "ch": "cosh",
    "th": "tanh",
}  # fmt: skip
"""Other names of commands."""
SYMBOLS = {
    "{": "\\{", "}": "\\}", "lbrace": "\\{", "rbrace": "\\}", "langle": "(", "rangle": ")", "lvert": "|", "rvert": "|",
    "vert": "|", "cdot": "*", "times": "*", "div": "/", "colon": ":", "degree": "°", "%": "%", "$": "$",
}  # fmt: skip
"""Commands that stand for a character."""
NO_MEANING = table(
    """left right tiny small normalsize large Large LARGE huge Huge ensuremath displaystyle textstyle limits nolimits
    mathbf boldsymbol bm mathit mathsf underline boxed fbox hline therefore minus
    big bigl bigr bigm bigg biggl biggr biggm Big Bigl Bigr Bigm Bigg Biggl Biggr Biggm"""
)
"""Commands that change no value, and the sign that is spelled out."""
VALUES: dict[str, Tree] = {
    "pi": Sym("pi"), "infty": Sym("infty"), **dict.fromkeys(("ldots", "dots", "cdots"), Sym("\\ldots")),
    **dict.fromkeys(("emptyset", "varnothing"), FiniteSet(())),
}  # fmt: skip
"""Commands that are a value of their own."""
NO_MEANING = table(
    """left right tiny small normalsize large Large LARGE huge Huge ensuremath displaystyle textstyle limits nolimits
    mathbf boldsymbol bm mathit mathsf underline boxed fbox hline therefore minus
    big bigl bigr bigm bigg biggl biggr biggm Big Bigl Bigr Bigm Bigg Biggl Biggr Biggm"""
)
"""Commands that change no value, and the sign that is spelled out."""
UNDONE = table(
    """sum prod int iint iiint oint lim limsup liminf gcd lcm max min sup inf det dim arg operatorname bigcup bigcap
    nabla"""
)
GREEK = table(
    """alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau
    upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon
    Phi Psi Omega ell hbar imath jmath"""
)
DECORATED = table("overline overrightarrow overleftrightarrow vec hat widehat tilde bar dot ddot angle triangle")
RELATIONS = {
    "=": "=", "equiv": "=", "approx": "~", "doteq": "~", "<": "<", ">": ">", "lt": "<", "gt": ">", "le": "<=",
    "leq": "<=", "leqslant": "<=", "ge": ">=", "geq": ">=", "geqslant": ">=", "ne": "!=", "neq": "!=", "in": "in",
}  # fmt: skip
CONNECTIVES = {"lor": "or", "vee": "or", "land": "and", "wedge": "and"}
TAKES_ARGUMENT = table("^ _ frac sqrt binom")

# --- words

CURRENCY = {
    "$": "dollar", "dollar": "dollar", "euro": "euro", "pounds": "sterling", "cents": "cent", "rupee": "rupee",
    "yen": "yen",
}  # fmt: skip
SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
"""Words behind a number that are part of it."""
_NUMBER_WORDS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"""
NUMBERS = dict(zip(_NUMBER_WORDS.split(), (*range(20), *range(20, 100, 10)), strict=True))
NAMED_SETS: dict[str, Tree] = {
    **dict.fromkeys(("all real numbers", "all reals", "any real number", "every real number"), REAL_LINE),
    **dict.fromkeys(("no solution", "no solutions", "no real solution", "no real solutions"), FiniteSet(())),
    **dict.fromkeys(("empty set", "the empty set"), FiniteSet(())),
}
CHOICE = re.compile(r"\s*(?P<word>(?:[Oo]ption|[Cc]hoice|[Aa]nswer)\s+)?\(?(?P<letter>[A-H])(?P<mark>[).:]*)\s*")
CHOICES = re.compile(r"[\s(]*[A-Z][\s)]*(?:(?:,|and|or|&)+[\s(]*[A-Z][\s)]*)+")
QUANTIFIER = re.compile(
    r"(?P<clause>\(|for|where|with)?(?P<all> ?(?:all|any|every|each|some))?"
    r"(?: ?(?P<kind>integer|real)s?(?: values?| numbers?)?(?: of)?)? ?\b(?P<name>[a-z])"
    r"(?P<integer> is an?y?(?: arbitrary)? integer| an integer)?(?P<taken> in mathbb (?:\{ )?(?P<set>[A-Z])(?: \})?)?"
    r" ?\)?"
)
"""The domain of a name, behind an answer: ``for all integers n``, ``n is an integer``, ``(n \\in \\mathbb{Z})``."""
QUANTIFIER_TOKENS = 12
"""Maximum tokens of a quantifier at the end of an answer."""
OTHER_WORDS = {"dne": "does not exist"}

# --- what may be dropped beside a number. Any other word is part of the value. Words that change a number (``half``,
# ``squared``, ``tenths``, ``billion``, ``negative``) do not belong here.

PREFIXES = ("", "kilo", "centi", "milli", "micro", "nano", "pico", "deci", "deka", "hecto", "mega", "giga", "tera")
UNITS = table(
    """meter metre gram second minute hour day week fortnight month year decade century liter inch foot yard mile
    nautical_mile light_year astronomical_unit parsec angstrom micron acre hectare gallon quart pint cup tablespoon
    teaspoon fluid_ounce bushel pound ounce stone ton metric_ton dalton newton joule watt horsepower volt ampere ohm
    siemens farad coulomb weber tesla henry hertz revolutions_per_minute pascal bar atmosphere torr millimeter_Hg
    psi pound_force_per_square_inch kelvin degree_Celsius degree_Fahrenheit mole watt_hour number_meter
    standard_atmosphere meter_Hg kilometer_per_hour foot_per_second cubic_centimeter unified_atomic_mass_unit barrel
    decibel furlong fathom carat grain dyne erg therm candela lumen lux becquerel gray sievert calorie electron_volt
    degree radian steradian arcminute arcsecond turn bit byte mile_per_hour knot percent british_thermal_unit
    foot_pound force_pound dollar cent euro sterling rupee yen"""
)
"""The units of pint, besides their multiples, that are units of an answer. Its constants and counts are numbers."""
NOUNS = table(
    """unit total altogether each per old tall long wide high deep away apart different distinct possible positive
    ordered unordered real complex integer integral rational prime whole natural solution answer root value number
    term digit point line plane side edge face vertex vertice angle triangle square rectangle circle polygon cube
    region area diagonal segment way arrangement permutation combination selection choice outcome case pair triplet
    quadruple set subset element factor divisor multiple sequence function path route move step turn game match
    round win loss goal vote people person man men woman women boy girl child children kid student pupil teacher
    parent friend member player team worker employee passenger customer guest adult family families class classe
    school room house home building floor seat table chair desk door window car bu buse train truck bike bicycle
    boat wheel book page word letter paper pen pencil crayon marker notebook card stamp coin bill penny pennie
    nickel dime box boxe bag basket bottle can jar packet pack package carton crate shelf shelve ball marble block
    tile stick bead button toy doll balloon candy candie candle cookie cake cupcake muffin pie slice pizza donut
    sandwich sandwiche egg apple orange banana pear peach peache plum grape lemon cherry cherrie strawberry
    strawberrie berry berrie tomato tomatoe potato potatoe carrot onion flower rose tulip tree plant leaf leave seed
    animal dog cat puppy puppie kitten bird chicken duck cow horse pig sheep goat rabbit fish bee bug ant ticket
    trip shirt shoe sock hat dress dresse photo picture song video movie problem question test lesson item piece
    part group row column color colour red blue green yellow black white shot stone rock nut bolt molecule atom cell
    bacteria download time bracelet necklace handshake glass glasse cup spoon plate message call text email phone
    computer robot island tourist soldier prize gift present stair flight lap mark job task sheet brick pound token
    chip lollipop chocolate cracker cubic linear valid such light year rev non-negative nonnegative nonzero
    one-digit two-digit three-digit four-digit five-digit six-digit lattice remaining left later ago snowman snowmen
    seashell sticker pancake bagel acorn widget medal badge ribbon magazine painting poster watch clock lamp bulb
    bed loaf loaves bread rice water milk juice sugar flour coffee tea gold silver sand paint wood fence post pole
    rope yarn"""
)
"""Counted things and words that describe them, as ``_stem`` writes them. Only these are dropped after a number."""
LABELS = table(
    """the a an our my its is are be as so thus hence then we i get have there which and for final answer result
    correct required desired minimum maximum minimal maximal average mean median mode probability perimeter volume
    length width height depth radius diameter circumference slope distance speed rate cost price profit age amount
    sum product difference quotient remainder ratio expression equation coefficient origin center centre point pair
    value number solution vertex line segment set function unit area region triangle coordinate least greatest
    smallest largest surface interval option exactly equal equals to given by only just simply clearly ans it he she
    they yes let finally has had needs gets pays her his their us obviously precisely indeed therefore total all in"""
)
"""Further words of a label: ``the answer is``."""
GENERIC = {"unit", "total"}
"""Nouns that do not name the counted thing."""
SHORT_PLURALS = {"hrs": "hr", "mins": "min", "secs": "s", "lbs": "lb", "yds": "yd", "yrs": "year", "kph": "km/hour"}
CURRENCIES = (
    "dollar = [dollar] = USD = usd",
    "cent = dollar / 100",
    "euro = [euro] = EUR = eur",
    "sterling = [sterling] = GBP",
    "rupee = [rupee] = INR",
    "yen = [yen] = JPY",
)
