"""The closed table of what may be dropped beside a number. Any other word is part of the value.

Words that change a number (``half``, ``squared``, ``tenths``, ``billion``, ``negative``) do not belong here.
"""

import re

PREFIXES = ("", "kilo", "centi", "milli", "micro", "nano", "pico", "deci", "deka", "hecto", "mega", "giga", "tera")
UNITS = frozenset(
    re.findall(
        r"\S+",
        """meter metre gram second minute hour day week fortnight month year decade century liter inch foot yard mile
    nautical_mile light_year astronomical_unit parsec angstrom micron acre hectare gallon quart pint cup tablespoon
    teaspoon fluid_ounce bushel pound ounce stone ton metric_ton dalton newton joule watt horsepower volt ampere ohm
    siemens farad coulomb weber tesla henry hertz revolutions_per_minute pascal bar atmosphere torr millimeter_Hg
    psi pound_force_per_square_inch kelvin degree_Celsius degree_Fahrenheit mole watt_hour number_meter
    standard_atmosphere meter_Hg kilometer_per_hour foot_per_second cubic_centimeter unified_atomic_mass_unit barrel
    decibel furlong fathom carat grain dyne erg therm candela lumen lux becquerel gray sievert calorie electron_volt
    degree radian steradian arcminute arcsecond turn bit byte mile_per_hour knot percent british_thermal_unit
    foot_pound force_pound dollar cent euro sterling rupee yen""",
    )
)
"""The units of pint, besides their multiples, that are units of an answer. Its constants and counts are numbers."""
NOUNS = frozenset(
    re.findall(
        r"\S+",
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
    rope yarn""",
    )
)
"""What is counted, and what says more of it, as ``_stem`` writes it. No other words are dropped behind a number."""
LABELS = frozenset(
    re.findall(
        r"\S+",
        """the a an our my its is are be as so thus hence then we i get have there which and for final answer result
    correct required desired minimum maximum minimal maximal average mean median mode probability perimeter volume
    length width height depth radius diameter circumference slope distance speed rate cost price profit age amount
    sum product difference quotient remainder ratio expression equation coefficient origin center centre point pair
    value number solution vertex line segment set function unit area region triangle coordinate least greatest
    smallest largest surface interval option exactly equal equals to given by only just simply clearly ans it he she
    they yes let finally has had needs gets pays her his their us obviously precisely indeed therefore total all in""",
    )
)
"""What a label has besides: ``the answer is``."""
