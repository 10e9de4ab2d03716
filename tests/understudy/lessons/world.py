"""Countries, capitals and continents: the facts that the understudy learns by heart."""

from dataclasses import dataclass

__all__ = ["CONTINENTS", "COUNTRIES", "FAMILIAR", "OTHER_CITIES", "Country", "by_name"]


@dataclass(frozen=True, slots=True)
class Country:
    """One country. `name` carries its article ("the Netherlands"); aliases are other spellings of name and capital."""

    name: str
    capital: str
    continent: str
    adjective: str
    aliases: tuple[str, ...] = ()
    capital_aliases: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The name as it stands in a list: without the article."""
        return self.name.removeprefix("the ")

    @property
    def capitals(self) -> tuple[str, ...]:
        """Every spelling of the capital that counts as right, the usual one first."""
        return (self.capital, *self.capital_aliases)


# name | capital | adjective | other names | other spellings of the capital
_TABLE = {
    "Africa": """
Algeria|Algiers|Algerian
Angola|Luanda|Angolan
Benin|Porto-Novo|Beninese||Porto Novo
Botswana|Gaborone|Botswanan
Burkina Faso|Ouagadougou|Burkinabe
Burundi|Gitega|Burundian
Cameroon|Yaoundé|Cameroonian||Yaounde
Cape Verde|Praia|Cape Verdean|Cabo Verde
the Central African Republic|Bangui|Central African|CAR
Chad|N'Djamena|Chadian||Ndjamena
the Comoros|Moroni|Comorian|Comoros
the Democratic Republic of the Congo|Kinshasa||DR Congo;DRC;Congo-Kinshasa
the Republic of the Congo|Brazzaville||Congo-Brazzaville
Djibouti|Djibouti City|Djiboutian||Djibouti
Egypt|Cairo|Egyptian
Equatorial Guinea|Malabo|Equatoguinean
Eritrea|Asmara|Eritrean
Eswatini|Mbabane|Swazi|Swaziland
Ethiopia|Addis Ababa|Ethiopian
Gabon|Libreville|Gabonese
the Gambia|Banjul|Gambian|Gambia
Ghana|Accra|Ghanaian
Guinea|Conakry|Guinean
Guinea-Bissau|Bissau|Bissau-Guinean|Guinea Bissau
Ivory Coast|Yamoussoukro|Ivorian|Côte d'Ivoire;Cote d'Ivoire
Kenya|Nairobi|Kenyan
Lesotho|Maseru|Basotho
Liberia|Monrovia|Liberian
Libya|Tripoli|Libyan
Madagascar|Antananarivo|Malagasy
Malawi|Lilongwe|Malawian
Mali|Bamako|Malian
Mauritania|Nouakchott|Mauritanian
Mauritius|Port Louis|Mauritian
Morocco|Rabat|Moroccan
Mozambique|Maputo|Mozambican
Namibia|Windhoek|Namibian
Niger|Niamey|Nigerien
Nigeria|Abuja|Nigerian
Rwanda|Kigali|Rwandan
São Tomé and Príncipe|São Tomé|São Toméan|Sao Tome and Principe|Sao Tome
Senegal|Dakar|Senegalese
Seychelles|Victoria|Seychellois|the Seychelles
Sierra Leone|Freetown|Sierra Leonean
Somalia|Mogadishu|Somali
South Africa|Pretoria|South African
South Sudan|Juba|South Sudanese
Sudan|Khartoum|Sudanese
Tanzania|Dodoma|Tanzanian
Togo|Lomé|Togolese||Lome
Tunisia|Tunis|Tunisian
Uganda|Kampala|Ugandan
Zambia|Lusaka|Zambian
Zimbabwe|Harare|Zimbabwean
""",
    "Asia": """
Afghanistan|Kabul|Afghan
Armenia|Yerevan|Armenian
Azerbaijan|Baku|Azerbaijani
Bahrain|Manama|Bahraini
Bangladesh|Dhaka|Bangladeshi
Bhutan|Thimphu|Bhutanese
Brunei|Bandar Seri Begawan|Bruneian
Cambodia|Phnom Penh|Cambodian
China|Beijing|Chinese|People's Republic of China
Georgia|Tbilisi|Georgian
India|New Delhi|Indian||Delhi
Indonesia|Jakarta|Indonesian
Iran|Tehran|Iranian
Iraq|Baghdad|Iraqi
Israel|Jerusalem|Israeli
Japan|Tokyo|Japanese
Jordan|Amman|Jordanian
Kazakhstan|Astana|Kazakh
Kuwait|Kuwait City|Kuwaiti
Kyrgyzstan|Bishkek|Kyrgyz
Laos|Vientiane|Laotian
Lebanon|Beirut|Lebanese
Malaysia|Kuala Lumpur|Malaysian
the Maldives|Malé|Maldivian|Maldives|Male
Mongolia|Ulaanbaatar|Mongolian||Ulan Bator
Myanmar|Naypyidaw|Burmese|Burma
Nepal|Kathmandu|Nepalese
North Korea|Pyongyang|North Korean
Oman|Muscat|Omani
Pakistan|Islamabad|Pakistani
Palestine|Ramallah|Palestinian
the Philippines|Manila|Philippine|Philippines
Qatar|Doha|Qatari
Saudi Arabia|Riyadh|Saudi
Singapore|Singapore|Singaporean
South Korea|Seoul|South Korean
Sri Lanka|Sri Jayawardenepura Kotte|Sri Lankan||Kotte
Syria|Damascus|Syrian
Taiwan|Taipei|Taiwanese
Tajikistan|Dushanbe|Tajik
Thailand|Bangkok|Thai
East Timor|Dili|Timorese|Timor-Leste
Turkey|Ankara|Turkish|Türkiye
Turkmenistan|Ashgabat|Turkmen
the United Arab Emirates|Abu Dhabi|Emirati|UAE;the UAE;United Arab Emirates
Uzbekistan|Tashkent|Uzbek
Vietnam|Hanoi|Vietnamese
Yemen|Sana'a|Yemeni||Sanaa
""",
    "Europe": """
Albania|Tirana|Albanian
Andorra|Andorra la Vella|Andorran
Austria|Vienna|Austrian
Belarus|Minsk|Belarusian
Belgium|Brussels|Belgian
Bosnia and Herzegovina|Sarajevo|Bosnian|Bosnia
Bulgaria|Sofia|Bulgarian
Croatia|Zagreb|Croatian
Cyprus|Nicosia|Cypriot
the Czech Republic|Prague|Czech|Czechia;Czech Republic
Denmark|Copenhagen|Danish
Estonia|Tallinn|Estonian
Finland|Helsinki|Finnish
France|Paris|French
Germany|Berlin|German
Greece|Athens|Greek
Hungary|Budapest|Hungarian
Iceland|Reykjavik|Icelandic||Reykjavík
Ireland|Dublin|Irish
Italy|Rome|Italian
Kosovo|Pristina|Kosovar
Latvia|Riga|Latvian
Liechtenstein|Vaduz|Liechtenstein
Lithuania|Vilnius|Lithuanian
Luxembourg|Luxembourg City|Luxembourgish||Luxembourg
Malta|Valletta|Maltese
Moldova|Chișinău|Moldovan||Chisinau
Monaco|Monaco|Monegasque
Montenegro|Podgorica|Montenegrin
the Netherlands|Amsterdam|Dutch|Netherlands;Holland
North Macedonia|Skopje|Macedonian|Macedonia
Norway|Oslo|Norwegian
Poland|Warsaw|Polish
Portugal|Lisbon|Portuguese
Romania|Bucharest|Romanian
Russia|Moscow|Russian
San Marino|San Marino|Sammarinese
Serbia|Belgrade|Serbian
Slovakia|Bratislava|Slovak
Slovenia|Ljubljana|Slovenian
Spain|Madrid|Spanish
Sweden|Stockholm|Swedish
Switzerland|Bern|Swiss||Berne
Ukraine|Kyiv|Ukrainian||Kiev
the United Kingdom|London|British|UK;the UK;United Kingdom;Great Britain;Britain
Vatican City|Vatican City|Vatican|the Vatican
""",
    "North America": """
Antigua and Barbuda|Saint John's|Antiguan||St. John's
the Bahamas|Nassau|Bahamian|Bahamas
Barbados|Bridgetown|Barbadian
Belize|Belmopan|Belizean
Canada|Ottawa|Canadian
Costa Rica|San José|Costa Rican||San Jose
Cuba|Havana|Cuban
Dominica|Roseau|
the Dominican Republic|Santo Domingo|Dominican|Dominican Republic
El Salvador|San Salvador|Salvadoran
Grenada|Saint George's|Grenadian||St. George's
Guatemala|Guatemala City|Guatemalan
Haiti|Port-au-Prince|Haitian||Port au Prince
Honduras|Tegucigalpa|Honduran
Jamaica|Kingston|Jamaican
Mexico|Mexico City|Mexican
Nicaragua|Managua|Nicaraguan
Panama|Panama City|Panamanian
Saint Kitts and Nevis|Basseterre|Kittitian|St Kitts and Nevis
Saint Lucia|Castries|Saint Lucian|St Lucia
Saint Vincent and the Grenadines|Kingstown|Vincentian|St Vincent and the Grenadines
Trinidad and Tobago|Port of Spain|Trinidadian
the United States|Washington, D.C.|American|USA;the USA;the US;America;United States|@
""",
    "South America": """
Argentina|Buenos Aires|Argentine
Bolivia|Sucre|Bolivian
Brazil|Brasília|Brazilian||Brasilia
Chile|Santiago|Chilean
Colombia|Bogotá|Colombian||Bogota
Ecuador|Quito|Ecuadorian
Guyana|Georgetown|Guyanese
Paraguay|Asunción|Paraguayan||Asuncion
Peru|Lima|Peruvian
Suriname|Paramaribo|Surinamese
Uruguay|Montevideo|Uruguayan
Venezuela|Caracas|Venezuelan
""",
    "Oceania": """
Australia|Canberra|Australian
Fiji|Suva|Fijian
Kiribati|South Tarawa|||Tarawa
the Marshall Islands|Majuro|Marshallese|Marshall Islands
Micronesia|Palikir|Micronesian
Nauru|Yaren|Nauruan
New Zealand|Wellington|New Zealand
Palau|Ngerulmud|Palauan
Papua New Guinea|Port Moresby|Papua New Guinean
Samoa|Apia|Samoan
the Solomon Islands|Honiara|Solomon Islands|Solomon Islands
Tonga|Nukuʻalofa|Tongan||Nuku'alofa;Nukualofa
Tuvalu|Funafuti|Tuvaluan
Vanuatu|Port Vila|Vanuatuan
""",
}

CONTINENTS: tuple[str, ...] = tuple(_TABLE)


def _read() -> tuple[Country, ...]:
    countries = []
    for continent, rows in _TABLE.items():
        for row in rows.strip().splitlines():
            fields = [*row.split("|"), "", ""][:5]
            fields[4] = fields[4].replace("@", "Washington D.C.;Washington DC;Washington")
            aliases, spellings = (tuple(part for part in field.split(";") if part) for field in fields[3:])
            countries.append(Country(fields[0], fields[1], continent, fields[2], aliases, spellings))
    return tuple(countries)


COUNTRIES: tuple[Country, ...] = _read()


def by_name(name: str) -> Country | None:
    """The country of that name or alias, whatever the case and the article; None when there is none."""
    return _BY_NAME.get(name.strip().lower().removeprefix("the "))


_BY_NAME: dict[str, Country] = {
    spelling.lower().removeprefix("the "): country
    for country in COUNTRIES
    for spelling in (country.name, *country.aliases)
}

_KNOWN = """France,Japan,Brazil,Egypt,Canada,Germany,India,Spain,Kenya,Italy,Australia,Mexico,China,Norway,Peru,Greece,
Morocco,the United States,Thailand,Poland,Argentina,Sweden,Turkey,the United Kingdom,Nigeria,Portugal,Vietnam,Chile,
Austria,New Zealand,Ireland,South Korea,Cuba,Finland,Indonesia,the Netherlands,Russia,Denmark,Hungary,Ethiopia,Belgium,
Ukraine,Switzerland,Colombia,Jamaica,Ghana,Fiji,Iceland"""

FAMILIAR: tuple[Country, ...] = tuple(
    _BY_NAME[name.lower().removeprefix("the ")] for name in _KNOWN.replace("\n", "").split(",")
)
"""Countries that most people can name, the best known first."""

# Large cities that people take for capitals: city -> its country's name.
OTHER_CITIES: dict[str, str] = {
    "Sydney": "Australia",
    "Melbourne": "Australia",
    "Toronto": "Canada",
    "Montreal": "Canada",
    "Vancouver": "Canada",
    "New York": "the United States",
    "Los Angeles": "the United States",
    "Chicago": "the United States",
    "Istanbul": "Turkey",
    "Rio de Janeiro": "Brazil",
    "São Paulo": "Brazil",
    "Barcelona": "Spain",
    "Seville": "Spain",
    "Munich": "Germany",
    "Hamburg": "Germany",
    "Frankfurt": "Germany",
    "Milan": "Italy",
    "Venice": "Italy",
    "Naples": "Italy",
    "Lyon": "France",
    "Marseille": "France",
    "Zurich": "Switzerland",
    "Geneva": "Switzerland",
    "Mumbai": "India",
    "Kolkata": "India",
    "Shanghai": "China",
    "Hong Kong": "China",
    "Osaka": "Japan",
    "Kyoto": "Japan",
    "Karachi": "Pakistan",
    "Lahore": "Pakistan",
    "Lagos": "Nigeria",
    "Casablanca": "Morocco",
    "Johannesburg": "South Africa",
    "Auckland": "New Zealand",
    "Dubai": "the United Arab Emirates",
    "Almaty": "Kazakhstan",
    "Rotterdam": "the Netherlands",
    "Antwerp": "Belgium",
    "Manchester": "the United Kingdom",
    "Liverpool": "the United Kingdom",
    "Edinburgh": "the United Kingdom",
    "Saint Petersburg": "Russia",
    "Krakow": "Poland",
    "Porto": "Portugal",
    "Gothenburg": "Sweden",
    "Bergen": "Norway",
    "Aarhus": "Denmark",
    "Salzburg": "Austria",
    "Guayaquil": "Ecuador",
    "Medellin": "Colombia",
    "Cancun": "Mexico",
    "Busan": "South Korea",
    "Chiang Mai": "Thailand",
    "Haifa": "Israel",
    "Alexandria": "Egypt",
    "Mombasa": "Kenya",
    "Dar es Salaam": "Tanzania",
    "Yangon": "Myanmar",
    "Jeddah": "Saudi Arabia",
}
