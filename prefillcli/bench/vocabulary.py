# ruff: noqa: SIM905
"""The words the sample texts are made of. Every asked word is one token with its leading space."""

TOPICS = tuple(
    """
    tennis chess sailing pottery baking gardening cycling opera jazz poetry astronomy geology
    robots castles volcanoes whales bees orchids coffee tea cheese wine bread pasta sushi
    chocolate knitting weaving origami painting sculpture theatre cinema comics puppets magic
    museums libraries bridges trains ferries airships rockets satellites comets glaciers deserts
    rivers caves islands forests wolves owls horses falcons dolphins turtles spiders beetles
    dinosaurs fossils crystals pearls amber silk denim perfume tattoos haircuts yoga boxing
    fencing judo rowing surfing skiing curling cricket rugby golf archery climbing hiking camping
    fishing kayaks karate marathons swimming dancing ballet tango salsa guitars violins drums
    pianos choirs vinyl podcasts radio printing typography maps globes clocks coins stamps kites
    toys puzzles dice cards poker lotteries inflation mortgages pensions taxes startups unions
    elections treaties monarchs pirates vikings pharaohs samurai knights alchemy algebra geometry
    statistics genetics vaccines allergies sleep memory anxiety habits meditation parenting
    adoption weddings funerals tourism hostels passports refugees languages grammar spelling
    translation recycling compost solar nuclear batteries hydrogen earthquakes hurricanes
    tides drones encryption compilers spreadsheets keyboards telescopes microscopes
    """.split()
)
CREDITORS = tuple(
    """
    Norvik Halden Brixa Tarnow Velmar Quonto Ostrel Lumera Kestral Zandor Mirelo Pavonte Drexel
    Fenwick Galbor Hestia Ivarsen Jantex Korvane Lindero Maxiom Nerida Oblong Pexton Quillar
    Rostova Sandvig Tormund Ulmera Vexley Wexham Xandris Yarrow Zephon Altora Bexhill Corvino
    Dunmore Elvane Farrow Grenada Hollis Isenor Jorvik Kendal Lorano Marrick Nordel Orvane Pelham
    Quarto Redwick Silvano Tobrik Umbrel Varenna Wolden Xebec Yelvert Zimora Ambrex Boreal Calvo
    Dorset Emberly Falkon Gorman Harbix Inverno Jasper Kilmar Lexor Montrex Nimbus Olverra Primus
    Quando Rivano Stellex Tundra Ursano Vantor Winslow Xylos Yorvane Zenith Arcado Blenko Cintra
    Delmor Estrel Fintra Glenard Hybrix Ixtal Jolvane Kravex Lanark Mondrel Nuvola Optima Polvar
    Querida Rendal Sorano Trevix Unitas Vorden Westro Yukon
    """.split()
)

SUBJECTS = tuple(
    """
    billing login refund delivery password invoice subscription calendar printer keyboard camera
    charger warranty voucher newsletter backup export search website firewall browser screen
    microphone speaker router battery contract address payment receipt discount upgrade account
    profile attachment signature license database dashboard reminder translation booking parking
    badge elevator heating lighting
    """.split()
)

FIRST_NAMES = tuple(
    """
    Anna Tom Maria Jonas Lena Paul Nina Oscar Clara Felix Ines Marco Sofia Emil Greta Hugo Alice
    Bruno Carla David Elena Frank Helga Igor Julia Karim Laura Milan Nora Peter Rosa Simon Tara
    Victor Wanda Yusuf
    """.split()
)
LAST_NAMES = tuple(
    """
    Keller Berg Novak Rossi Martin Olsen Weber Costa Lindt Moreau Kowal Silva Brandt Fischer Young
    Walker Santos Petrov Haas Dubois Larsen Romero Adler Quinn
    """.split()
)
CITIES = tuple(
    """
    Lyon Oslo Porto Vienna Turin Ghent Leeds Bergen Krakow Malmo Seville Basel Dublin Riga Bristol
    Zurich Hamburg Nantes Prague Utrecht
    """.split()
)
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
