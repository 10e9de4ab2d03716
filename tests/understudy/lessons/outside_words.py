"""Words for questions outside of the lessons: topics, people, tasks, programs, and small phrase books of languages."""

__all__ = [
    "ACTIONS",
    "ADJECTIVES",
    "BOOKS",
    "KINDS",
    "LANGUAGES",
    "PEOPLE",
    "PIECES",
    "PROGRAMS",
    "SCRIPTS",
    "THINGS",
    "TOPICS",
]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _parts(text: str) -> tuple[str, ...]:
    """What stands between semicolons, on one line each."""
    return tuple(" ".join(part.split()) for part in text.split(";") if part.strip())


TOPICS: tuple[str, ...] = _parts(
    """
climate change; the French Revolution; the Roman Empire; World War II; the Middle Ages; the Cold War; black holes;
gravity; photosynthesis; evolution; DNA; atoms; electricity; magnetism; earthquakes; volcanoes; tornadoes; dinosaurs;
whales; sharks; bees; ants; birds; horses; dogs; cats; elephants; tigers; snakes; spiders; mushrooms; trees; roses;
gardening; cooking; baking; pasta; pizza; sushi; coffee; tea; wine; beer; chocolate; cheese; bread; soup; breakfast;
football; soccer; basketball; tennis; chess; swimming; running; yoga; hiking; skiing; cycling; boxing; the Olympics;
music; jazz; opera; the piano; the guitar; painting; photography; sculpture; theatre; movies; anime; video games;
novels;
Shakespeare; Mozart; Einstein; Newton; Napoleon; Cleopatra; Gandhi; Picasso; Beethoven; Darwin; Tesla; Leonardo da
Vinci;
philosophy; ethics; religion; Buddhism; Christianity; Islam; mythology; Zeus; psychology; sleep; dreams; memory; stress;
anxiety; happiness; love; friendship; marriage; divorce; parenting; babies; teenagers; school; university; exams;
homework;
jobs; interviews; salaries; management; leadership; marketing; sales; startups; taxes; inflation; the stock market;
bitcoin;
mortgages; insurance; banks; credit cards; budgets; savings; retirement; laws; contracts; copyright; patents; elections;
democracy; human rights; war; peace; immigration; poverty; education; health; vaccines; viruses; bacteria; cancer;
diabetes;
headaches; fever; allergies; vitamins; diets; weight loss; exercise; muscles; the heart; the brain; the lungs; blood
pressure;
teeth; skin; hair; computers; laptops; phones; the internet; wifi; routers; passwords; encryption; hackers; databases;
servers; the cloud; robots; artificial intelligence; machine learning; neural networks; blockchains; operating systems;
compilers; recursion; algorithms; sorting; binary trees; linked lists; hash tables; regular expressions; threads;
deadlocks;
cars; electric cars; bicycles; trains; planes; rockets; ships; bridges; roads; traffic; engines; batteries; solar
panels;
nuclear power; wind turbines; oil; gas; coal; steel; plastic; glass; paper; concrete; houses; kitchens; furniture;
lamps;
carpets; windows; fashion; shoes; jeans; hats; jewelry; perfume; weddings; birthdays; Christmas; Easter; Halloween;
travel;
hotels; beaches; camping; passports; visas; airports; luggage; museums; castles; pyramids; the Eiffel Tower; Mount
Everest;
the moon; stars; galaxies; comets; the solar system; Mars; aliens; time travel; ghosts; vampires; dragons; magic;
poetry;
grammar; spelling; punctuation; vocabulary; accents; metaphors; history; geography; chemistry; physics; biology;
economics;
sociology; statistics; probability; geometry; algebra; calculus; prime numbers; fractions; percentages; logarithms;
matrices;
vectors; infinity; acids; metals; oxygen; carbon; hydrogen; iron; copper; uranium; diamonds; crystals; clouds; rain;
snow;
lightning; rainbows; oceans; rivers; lakes; deserts; forests; mountains; islands; glaciers; pollution; recycling;
farming;
cows; pigs; chickens; sheep; eggs; milk; butter; rice; potatoes; tomatoes; onions; garlic; apples; bananas; oranges;
grapes;
"""
)

ADJECTIVES = _words(
    """good bad big small old new young long short tall high low hot cold warm cool fast slow early late easy hard
heavy light dark bright loud quiet clean dirty dry wet rich poor cheap expensive strong weak safe dangerous healthy sick
happy sad angry calm funny serious famous unknown real fake true false right wrong common rare modern ancient public
private
open closed full empty sharp soft smooth rough sweet sour salty bitter fresh rotten deep shallow wide narrow thick thin
simple complex local global legal illegal normal strange beautiful ugly popular boring exciting useful useless possible
impossible free busy lazy honest polite rude kind cruel brave shy proud jealous lonely clever stupid professional formal
informal friendly romantic scary spicy vegan electric digital magnetic chemical natural royal national"""
)

ACTIONS = _words(
    """learn teach build cook bake grow play win lose find buy sell rent drive fly swim run walk climb catch throw cut
break mend wash dry iron sew knit paint write read speak translate pronounce spell install uninstall download compile
debug deploy configure connect disconnect train feed tame breed cure heal treat avoid prevent reduce increase improve
change
replace remove add attach tie fold boil fry roast freeze melt burn dig plant water harvest hunt kill survive meet
date marry divorce raise invite thank apologise complain negotiate invest save spend borrow lend steal hide"""
)

PEOPLE = _words(
    """boss manager colleague customer client teacher professor student neighbour landlord tenant friend mother father
sister brother daughter son wife husband girlfriend boyfriend grandmother grandfather uncle aunt cousin doctor
dentist nurse
lawyer judge policeman plumber electrician mechanic driver pilot sailor soldier general president minister mayor king
queen
prince princess actor singer dancer painter writer poet journalist editor photographer chef waiter baker butcher farmer
gardener fisherman hunter carpenter tailor hairdresser programmer designer engineer scientist astronaut astronomer
chemist
biologist physicist mathematician historian philosopher priest monk coach player referee captain thief detective spy
pirate
wizard witch vampire knight philosopher therapist recruiter investor founder intern secretary accountant team"""
)

THINGS = _words(
    """tree flower fish insect mammal reptile dinosaur river lake mountain volcano island desert forest star galaxy book
novel poem song band album movie film actor singer painter painting composer opera play game sport team player club
stadium
car brand company startup product app website browser language dialect alphabet proverb idiom joke riddle poet writer
king
queen emperor president minister war battle treaty law right tax currency bank stock crime weapon ship train plane
airport
bridge tower castle museum church temple god myth religion festival holiday dish dessert cake soup sauce spice herb
cheese
wine beer cocktail drink nut berry grain bean dog breed cat breed horse bird snake frog bee disease symptom vitamin bone
muscle organ nerve gene cell virus element metal acid gas crystal mineral rock fossil tool machine engine robot computer
phone chip protocol database framework library algorithm theorem equation formula constant shape dance instrument string
hobby job skill habit value emotion virtue sin dream gift toy hat shoe dress fabric room chair lamp carpet tile
advantage disadvantage reason cause effect difference benefit risk tip trick step idea example fact quote synonym rhyme
question argument mistake problem solution goal strategy method theory hypothesis experiment invention discovery"""
)

# What somebody asks to have written or made.
PIECES: tuple[str, ...] = _parts(
    """
an email; a letter; a poem; an essay; a song; a haiku; a speech; a tweet; a blog post; a cover letter; a resume; a
report;
a product description; a slogan; a headline; a business plan; a workout plan; a diet plan; a meal plan; a travel plan;
a shopping list; a recipe; a toast; a birthday card; an invitation; a complaint; a review; a press release; a quiz; a
riddle;
a script; a dialogue; a scene; a novel; a chapter; a diary entry; a contract; a thank you note; a resignation letter;
an apology; a summary; a presentation; an outline; a newsletter; an advertisement; a caption; a bio; a job posting;
a love letter; a rap; a short text; a paragraph; a sentence; a conclusion; an introduction; a title; a user manual; a
README;
a lesson plan; a schedule; a to-do list; a checklist; a table; a chart; a diagram; a logo; a picture; a website; an app;
a game; a bot; a mind map; a survey; a proposal; a memo; a message; a reply; an answer; a description; a definition;
a comparison; an analysis; a critique; an obituary; a prayer; a fable; a fairy tale in verse; a screenplay; a monologue
"""
)

KINDS: tuple[str, ...] = _words(
    """Python JavaScript Java C C++ C# Rust Go Ruby PHP Swift Kotlin Scala Haskell Perl R SQL HTML CSS Bash
    PowerShell Lua
TypeScript Julia MATLAB Assembly Fortran Lisp Erlang React Django Flask Docker Kubernetes Git Linux Windows Excel
LaTeX regex
numpy pandas pytorch"""
)
PROGRAMS: tuple[str, ...] = _parts(
    """
reverses a string; sorts a list; reads a file; downloads a page; counts words; finds the maximum; computes a factorial;
prints hello world; parses JSON; sends an email; connects to a database; draws a circle; plays a sound; opens a window;
removes duplicates; merges two lists; checks for palindromes; computes prime numbers; inverts a matrix; resizes an
image;
generates a password; validates an email address; scrapes a website; logs errors; retries requests; caches results;
reads a CSV file; writes to a log; starts a thread; handles a signal; hashes a password; compresses a folder; renames
files;
converts units; plots a graph; trains a model; splits a string; joins tables; groups rows; deletes old files; pings a
server;
swaps two variables; searches a tree; walks a graph; computes fibonacci numbers; encrypts a text; rotates an array
"""
)

LANGUAGES = _words(
    """French German Spanish Italian Portuguese Dutch Swedish Norwegian Danish Finnish Polish Czech Russian Ukrainian
Turkish Greek Arabic Hebrew Hindi Bengali Chinese Mandarin Japanese Korean Vietnamese Thai Indonesian Latin Swahili
Hungarian
Romanian Bulgarian Persian Urdu Tamil Esperanto"""
)

# Openers and what may follow them, of languages that the model cannot speak. Composed at random, they show the model
# what such languages look like, not what they say.
BOOKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    name: (
        _parts(openers),
        _parts(rests),
    )
    for name, openers, rests in (
        (
            "German",
            """Was ist; Wer ist; Wo ist; Wie funktioniert; Warum ist; Kannst du mir erklären,; Bitte schreibe; Ich
            brauche;
            Ich möchte; Wie geht es; Erzähl mir von; Was kostet; Wann kommt; Nenne mir; Hilf mir mit; Was bedeutet;
            Ich habe eine Frage zu; Kennst du; Sag mir; Welche Farbe hat; Wie viele Menschen kennen; Schreib mir;
            Gibt es""",
            """die Hauptstadt von Frankreich; das Wetter heute; der Hund; die Katze; ein Gedicht über den Frühling;
            die Zeit;
            einen Brief an meinen Chef; das Haus; die Schule; dein Name; dir; die Welt; der Himmel; das Auto; mein
            Bruder; drei
            Länder in Europa; die Summe von zwei und drei; eine kurze Geschichte; das Buch; der Bahnhof; ein gutes
            Restaurant;
            eine Liste mit Tieren; das Leben; heute Abend; morgen früh; die beste Musik; zwei plus zwei; nicht so
            wichtig""",
        ),
        (
            "French",
            """Qu'est-ce que; Qui est; Où est; Comment fonctionne; Pourquoi; Peux-tu m'expliquer; Écris; J'ai besoin
            de; Je
            voudrais; Comment va; Parle-moi de; Combien coûte; Quand arrive; Donne-moi; Aide-moi avec; Que signifie;
            Quelle est;
            Connais-tu; Dis-moi; Quelle est la couleur de; Bonjour, c'est quoi; Est-ce que tu aimes; Raconte-moi""",
            """la capitale de l'Allemagne; le temps aujourd'hui; le chien; le chat; un poème sur le printemps; une
            lettre à mon
            patron; la maison; l'école; ton nom; le monde; le ciel; la voiture; mon frère; trois pays en Afrique; la
            somme de
            deux et trois; une petite histoire; le livre; la gare; un bon restaurant; une liste d'animaux; la vie; ce
            soir;
            demain matin; la musique; l'eau; les enfants; le pain et le fromage""",
        ),
        (
            "Spanish",
            """Qué es; Quién es; Dónde está; Cómo funciona; Por qué; Puedes explicarme; Escribe; Necesito; Quiero;
            Cómo está;
            Háblame de; Cuánto cuesta; Cuándo llega; Dame; Ayúdame con; Qué significa; Cuál es; Conoces; Dime; De qué
            color es;
            Hola, qué es; Te gusta; Cuéntame""",
            """la capital de Italia; el tiempo hoy; el perro; el gato; un poema sobre la primavera; una carta a mi
            jefe; la
            casa; la escuela; tu nombre; el mundo; el cielo; el coche; mi hermano; tres países de Asia; la suma de
            dos y tres;
            un cuento corto; el libro; la estación; un buen restaurante; una lista de animales; la vida; esta noche;
            mañana por
            la mañana; la música; el agua; los niños""",
        ),
        (
            "Italian",
            """Che cos'è; Chi è; Dov'è; Come funziona; Perché; Puoi spiegarmi; Scrivi; Ho bisogno di; Vorrei; Come
            sta; Parlami
            di; Quanto costa; Quando arriva; Dammi; Aiutami con; Cosa significa; Qual è; Conosci; Dimmi; Di che
            colore è; Ciao,
            cos'è; Ti piace; Raccontami""",
            """la capitale della Spagna; il tempo oggi; il cane; il gatto; una poesia sulla primavera; una lettera al
            mio capo;
            la casa; la scuola; il tuo nome; il mondo; il cielo; la macchina; mio fratello; tre paesi in Europa; la
            somma di due
            e tre; una breve storia; il libro; la stazione; un buon ristorante; un elenco di animali; la vita;
            stasera; domani
            mattina; la musica; l'acqua""",
        ),
        (
            "Portuguese",
            """O que é; Quem é; Onde fica; Como funciona; Por que; Você pode explicar; Escreva; Eu preciso de; Eu
            quero; Como
            está; Fale sobre; Quanto custa; Quando chega; Me dê; Me ajude com; O que significa; Qual é; Você conhece;
            Diga-me;
            De que cor é; Olá, o que é; Você gosta de; Conte""",
            """a capital do Brasil; o tempo hoje; o cachorro; o gato; um poema sobre o mar; uma carta para o meu
            chefe; a casa;
            a escola; o seu nome; o mundo; o céu; o carro; meu irmão; três países da África; a soma de dois e três;
            uma história
            curta; o livro; a estação; um bom restaurante; uma lista de animais; a vida; esta noite; amanhã de manhã;
            a música;
            o pão""",
        ),
        (
            "Dutch",
            """Wat is; Wie is; Waar is; Hoe werkt; Waarom is; Kun je uitleggen; Schrijf; Ik heb nodig; Ik wil; Hoe
            gaat het met;
            Vertel me over; Hoeveel kost; Wanneer komt; Geef me; Help me met; Wat betekent; Welke kleur heeft; Ken
            je; Zeg me;
            Hallo, wat is""",
            """de hoofdstad van Duitsland; het weer vandaag; de hond; de kat; een gedicht over de lente; een brief
            aan mijn
            baas; het huis; de school; jouw naam; de wereld; de lucht; de auto; mijn broer; drie landen in Europa; de
            som van
            twee en drie; een kort verhaal; het boek; het station; een goed restaurant; een lijst met dieren; het
            leven""",
        ),
        (
            "Swedish",
            """Vad är; Vem är; Var ligger; Hur fungerar; Varför är; Kan du förklara; Skriv; Jag behöver; Jag vill ha;
            Hur mår;
            Berätta om; Vad kostar; När kommer; Ge mig; Hjälp mig med; Vad betyder; Vilken färg har; Känner du; Säg
            mig""",
            """huvudstaden i Norge; vädret idag; hunden; katten; en dikt om våren; ett brev till min chef; huset;
            skolan; ditt
            namn; världen; himlen; bilen; min bror; tre länder i Asien; summan av två och tre; en kort saga; boken;
            stationen;
            en bra restaurang; en lista med djur; livet""",
        ),
        (
            "Polish",
            """Co to jest; Kto to jest; Gdzie jest; Jak działa; Dlaczego; Czy możesz wyjaśnić; Napisz; Potrzebuję;
            Chcę; Jak się
            ma; Opowiedz mi o; Ile kosztuje; Kiedy przyjdzie; Daj mi; Pomóż mi z; Co znaczy; Jaka jest; Czy znasz;
            Powiedz mi""",
            """stolica Francji; pogoda dzisiaj; pies; kot; wiersz o wiośnie; list do mojego szefa; dom; szkoła; twoje
            imię;
            świat; niebo; samochód; mój brat; trzy kraje w Europie; suma dwóch i trzech; krótka historia; książka;
            dworzec;
            dobra restauracja; lista zwierząt; życie""",
        ),
        (
            "Turkish",
            """Nedir; Kimdir; Nerede; Nasıl çalışır; Neden; Açıklayabilir misin; Bana yaz; İhtiyacım var; İstiyorum;
            Nasılsın;
            Bana anlat; Ne kadar; Ne zaman; Bana ver; Yardım et; Ne demek; Biliyor musun; Söyle bana; Merhaba""",
            """Türkiye'nin başkenti; bugün hava; köpek; kedi; bahar hakkında bir şiir; patronuma bir mektup; ev;
            okul; senin
            adın; dünya; gökyüzü; araba; kardeşim; üç ülke; iki artı üç; kısa bir hikaye; kitap; istasyon; iyi bir
            restoran;
            hayvan listesi; hayat""",
        ),
        (
            "Russian",
            """Что такое; Кто такой; Где находится; Как работает; Почему; Можешь объяснить; Напиши; Мне нужно; Я
            хочу; Как
            дела; Расскажи мне про; Сколько стоит; Когда приходит; Дай мне; Помоги мне с; Что значит; Какой; Ты знаешь;
            Скажи; Привет, что такое""",
            """столица Франции; погода сегодня; собака; кошка; стихотворение о весне; письмо начальнику; дом; школа;
            твоё имя;
            мир; небо; машина; мой брат; три страны в Европе; сумма двух и трёх; короткая сказка; книга; вокзал; хороший
            ресторан; список животных; жизнь""",
        ),
        (
            "Chinese",
            """什么是; 谁是; 哪里是; 怎么做; 为什么; 请解释; 请写; 我需要; 我想要; 你好,; 告诉我; 多少钱; 什么时候;
            给我; 帮我; 你知道;
            你喜欢; 介绍一下""",
            """法国的首都; 今天的天气; 狗; 猫; 一首关于春天的诗; 一封给老板的信; 房子; 学校; 你的名字; 世界; 天空;
            汽车; 我的哥哥;
            三个国家; 二加三; 一个小故事; 书; 火车站; 好的餐厅; 动物的名字; 生活""",
        ),
        (
            "Japanese",
            """教えてください; 何ですか; 誰ですか; どこですか; どうして; 説明してください; 書いてください;
            こんにちは、; 私は; いくらですか;
            いつですか; 手伝ってください; 知っていますか""",
            """フランスの首都; 今日の天気; 犬; 猫; 春の詩; 上司への手紙; 家; 学校; あなたの名前; 世界; 空; 車;
            私の兄; 三つの国; 短い話;
            本; 駅; いいレストラン; 動物; 人生""",
        ),
        (
            "Arabic",
            """ما هو; من هو; أين; كيف يعمل; لماذا; هل يمكنك أن تشرح; اكتب; أحتاج; أريد; كيف حال; أخبرني عن; كم سعر;
            متى يأتي;
            أعطني; ساعدني في; ماذا يعني; هل تعرف; مرحبا""",
            """عاصمة فرنسا; الطقس اليوم; الكلب; القط; قصيدة عن الربيع; رسالة إلى مديري; البيت; المدرسة; اسمك; العالم;
            السماء;
            السيارة; أخي; ثلاث دول; قصة قصيرة; الكتاب; المحطة; مطعم جيد; الحياة""",
        ),
        (
            "Hindi",
            """क्या है; कौन है; कहाँ है; कैसे काम करता है; क्यों; समझाओ; लिखो; मुझे चाहिए; मैं चाहता हूँ; नमस्ते;
            मुझे बताओ; कितने का है; कब
            आएगा; मदद करो""",
            """फ्रांस की राजधानी; आज का मौसम; कुत्ता; बिल्ली; वसंत पर कविता; घर; स्कूल; तुम्हारा नाम; दुनिया; आकाश;
            गाड़ी; मेरा भाई;
            तीन देश; छोटी कहानी; किताब; स्टेशन; जीवन""",
        ),
    )
}  # fmt: skip

# First and last code point of the letters of a script.
SCRIPTS: tuple[tuple[int, int], ...] = (
    (0x0400, 0x045F), (0x0391, 0x03C9), (0x0621, 0x064A), (0x05D0, 0x05EA), (0x0905, 0x0939), (0x0985, 0x09B9),
    (0x0B85, 0x0BB9), (0x0E01, 0x0E2E), (0x10D0, 0x10F0), (0x0531, 0x0556), (0x1200, 0x1248), (0x3041, 0x3096),
    (0x30A1, 0x30FA), (0x4E00, 0x9FA5), (0x4E00, 0x6000), (0xAC00, 0xD7A3), (0x1F300, 0x1F64F), (0x00C0, 0x017F),
)  # fmt: skip
